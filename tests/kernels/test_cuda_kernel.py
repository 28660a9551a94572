"""The CUDA handlers and kernels: every case against the oracle, any batch, faulty metadata. What
they share with the CPU's is in tests/support/kernel_tests.py. They run on an emulated GPU, which
executes the PTX that nvcc emits (tools/emulated_gpu), with arrays between guard pages and with
several orders of warps. `make gpu-check` runs this file on a GPU. What concerns Hopper GPUs runs with
their kernels, too."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from harness import reference
from harness.arrays import guarded
from harness.compare import assert_close_on_cuda, assert_same_bits
from shared_ffi import kv_cache_update, paged_attention, simple_add
from shared_ffi.spec import ArraySpec
from tests.cases.all import CASES, LONG_CASES, UPDATE_CASES
from tests.cases.case import FEATURES, INT8_NVFP4, JUNK, MXFP4, NVFP4, Case, Groups
from tests.cases.random_calls import attention_cases
from tests.cases.updates import UpdateCase
from tests.support import scripts, selection, without_python
from tests.support.calls import (
    checked_call,
    in_place,
    numbers,
    results_of,
)
from tests.support.gpu import ON_CUDA, EmulatedGpu, Gpu, attend, scratch_of, skip_without_code
from tests.support.kernel_tests import *  # noqa: F403
from tests.support.kernel_tests import BATCH, batch, one_sequence

F32, I32 = np.float32, np.int32


@pytest.fixture(scope="session")
def kernels(gpu: Gpu) -> Gpu:
    return gpu


@pytest.fixture(scope="session", params=["portable", "hopper"])
def each_kernel(request: pytest.FixtureRequest, gpu: Gpu) -> Gpu:
    """The GPU, with the portable kernels and with those of Hopper GPUs."""
    return gpu.on_hopper() if request.param == "hopper" else gpu


def has_hopper_kernels(case: Case) -> bool:
    """Whether the decode kernel or the prefill kernel computes some queries of the case."""
    rows = max(
        case.num_heads // case.num_kv_heads * q_len for q_len, _ in [(0, 0), *case.sequences]
    )
    return (
        case.dtype != "float32"
        and not case.multiplies_rows()
        and "int4" not in (case.cache_dtype, case.value_cache_dtype)
        and case.head_size % (8 if case.cache_dtype is None else 16) == 0
        and case.head_size <= (256 if case.cache_dtype is None else 128)
        and (case.num_heads <= 16 * case.num_kv_heads or rows > 64)
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("case", LONG_CASES, ids=lambda case: case.id)
def test_long_queries(case: Case, each_kernel: Gpu) -> None:
    test_paged_attention(case, each_kernel)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "case", [case for case in CASES if has_hopper_kernels(case)], ids=lambda case: case.id
)
def test_paged_attention_on_hopper(case: Case, gpu: Gpu) -> None:
    test_paged_attention(case, gpu.on_hopper())


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Computes a case. Returns of each kernel its thread blocks, the threads of a block, and whether
    it begins before the one before it has ended."""
    if ON_CUDA:
        pytest.skip("only the emulated GPU tells what was launched")
    log = tmp_path / "launches"
    monkeypatch.setenv("EMULATED_GPU_LAUNCHES", str(log))

    def launches(gpu: Gpu, case: Case, seed: int = 0) -> list[Any]:
        log.write_text("")
        attend(gpu, case.inputs(), **case.attributes(), seed=seed)
        return [tuple(map(int, line.split())) for line in log.read_text().splitlines()]

    return launches


# The threads of a block tell the kernels apart.
DECODE, HOPPER, PORTABLE, COMBINE, ZEROS = 192, 384, 128, 128, 1024


@pytest.mark.parametrize(
    ("group", "q_lens", "max_query_len", "kernels"),
    [
        (2, (1, 1), 1, [ZEROS, DECODE]),
        (2, (1, 1), None, [ZEROS, DECODE]),  # no query is longer than all together
        (2, (8, 5), 8, [ZEROS, DECODE]),
        (2, (9, 1), 9, [ZEROS, DECODE, HOPPER, COMBINE]),
        (2, (1, 300), None, [ZEROS, DECODE, HOPPER, COMBINE]),
        (24, (2, 1), 2, [PORTABLE, COMBINE]),  # more rows than the decode kernel has
        (24, (3, 1), 3, [PORTABLE, HOPPER, COMBINE]),
    ],
)
def test_the_kernels_of_a_call_on_hopper(
    group: int, q_lens: Any, max_query_len: int | None, kernels: Any, gpu: Gpu, launches: Any
) -> None:
    """A decoding step launches the decode kernel, and before it one thread block that sets numbers
    to zero and compares rows of the block table, unless no context can be split, nor the window."""
    case = Case(
        id="launches",
        sequences=tuple((q_len, 700) for q_len in q_lens),
        num_heads=2 * group,
        dtype="float16",
        max_query_len=max_query_len,
        padding_tokens=0,
    )
    launched = launches(gpu.on_hopper(), case)
    assert [threads for _, threads, _ in launched] == kernels
    assert kernels[0] != ZEROS or launched[0][:2] == (1, ZEROS)
    # The other kernels: for queries of up to 64 rows, and for longer ones where there may be some.
    rest = [PORTABLE] * (1 + (HOPPER in kernels and group * max(q_lens) > 64))
    portable = [ZEROS, DECODE] if DECODE in kernels else []
    if kernels != portable:
        portable += [*rest, COMBINE]
    assert [threads for _, threads, _ in launches(gpu, case)] == portable
    if kernels == [ZEROS, DECODE]:
        short = replace(case, sequences=tuple((q_len, 60) for q_len in q_lens), unused_blocks=0)
        for each in (gpu, gpu.on_hopper()):
            for unsplit in (short, replace(case, sliding_window=128)):
                assert [threads for _, threads, _ in launches(each, unsplit)] == [DECODE]


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_a_window_of_128_has_one_split(cache_dtype: str | None, each_kernel: Gpu) -> None:
    """Wherever it begins, and with several query tokens, too: no partial result is written."""
    case = Case(
        id="window",
        sequences=tuple((1 + n % 4, 600 + 13 * n) for n in range(32)),
        head_size=128,
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        sliding_window=128,
        max_query_len=4,
    )
    inputs, attributes = case.inputs(), case.attributes()
    scratch = scratch_of(inputs, attributes)
    result = attend(each_kernel, inputs, scratch=scratch, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    assert (scratch != 0xFF).sum() <= 4  # the counter for another kernel
    assert_same_bits(attend(each_kernel, inputs, **attributes, seed=2), result)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merge_begins_early(dtype: str, gpu: Gpu, launches: Any) -> None:
    """While the last thread blocks of the kernel before it run, whichever kernel that is. With the
    portable kernels chosen by name none does."""
    case = Case(id="early", sequences=((1, 900),), dtype=dtype, head_size=128)
    assert [early for *_, early in launches(gpu.on_hopper(), case)][-1] == 1
    assert [early for *_, early in launches(gpu, case)] == [0, 0]


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 103, 120, 121])
def test_the_gpu_decides_which_kernels_run(capability: int, gpu: Gpu, launches: Any) -> None:
    skip_without_code(gpu, capability)
    case = Case(id="mixed", sequences=((1, 900), (100, 300)), dtype="bfloat16", head_size=64)
    portable = type(gpu)(gpu.native, "portable", capability)
    by_gpu = type(gpu)(gpu.native, "by GPU", capability)
    is_hopper = capability == 90
    assert portable.kernels_in_use() == ["decode", "portable"]
    assert by_gpu.kernels_in_use() == ["decode", *(["prefill"] if is_hopper else []), "portable"]
    others = [ZEROS, DECODE, PORTABLE, PORTABLE, COMBINE]
    assert [threads for _, threads, _ in launches(portable, case)] == others
    kernels = [ZEROS, DECODE, HOPPER, COMBINE] if is_hopper else others
    assert [threads for _, threads, _ in launches(by_gpu, case)] == kernels


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize(
    "features",
    [
        {"num_heads": 2},
        {"num_heads": 10, "head_size": 40, "sinks": True},
        {"num_heads": 16, "head_size": 200, "cache_dtype": None, "return_lse": True},
        {"num_heads": 16, "cache_dtype": "float8_e4m3fn", "scales": "per position"},
    ],
    ids=["few-rows", "some-rows", "wide", "float8"],
)
def test_decoding_has_the_same_bits_on_every_gpu(
    features: dict[str, Any], capability: int, gpu: Gpu
) -> None:
    """Where a multiprocessor has less memory, fewer KV tiles are on their way at once, and the warps
    merge some rows after the others. Beside a long query, too, which other kernels compute."""
    skip_without_code(gpu, capability)
    sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "block_size": 16}
    sizes |= {"dtype": "bfloat16"} | features
    case = Case(id="same", sequences=((1, 900), (1, 37), (20, 60), (1, 260)), **sizes)
    inputs, attributes = case.inputs(), case.attributes()
    results = [
        attend(type(gpu)(gpu.native, "by GPU"), inputs, **attributes),
        *[
            attend(type(gpu)(gpu.native, "portable", capability), inputs, seed=seed, **attributes)
            for seed in (0, 1, 20)
        ],
    ]
    for result in results:
        assert_close_on_cuda(result, inputs, attributes)
    decoded = [0, 1, 22]  # the tokens of short sequences
    outputs = [x if isinstance(x, tuple) else (x,) for x in results]
    for arrays in outputs[1:]:
        for x, expected in zip(arrays, outputs[0], strict=True):
            assert_same_bits(x[decoded], expected[decoded])


def test_the_number_of_thread_blocks_is_limited(gpu: Gpu, launches: Any) -> None:
    """There are as many as the GPU holds, 132 here, unless the limit is lower."""
    case = Case(id="many", sequences=((1, 20),) * 70, dtype="float16", max_query_len=1)
    for seed, limit in ((20, 132), (27, 7), (13, 1), (6, 3)):  # seeds with 132 multiprocessors
        for each in (gpu, gpu.on_hopper()):
            *_, (decode, threads, _) = launches(each, case, seed)
            assert (decode, threads) == (limit, DECODE)
        *_, (combine, *_) = launches(gpu, replace(case, dtype="float32"), seed)
        assert combine == min(limit, 73)


@pytest.mark.parametrize("scales", ["per head", "per position"])
def test_the_hopper_kernel_needs_one_scale_for_all_positions(scales: str, gpu: Gpu) -> None:
    """The bits of two kernels differ by rounding."""
    case = Case(
        id="scales-of-positions",
        sequences=((100, 300), (70, 70)),
        dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
        scales=scales,
    )
    inputs, attributes = case.inputs(), case.attributes()
    plain = attend(gpu, inputs, **attributes)
    chosen = attend(gpu.on_hopper(), inputs, **attributes)
    assert (chosen != plain).any() == (scales == "per head")


@pytest.mark.skipif(ON_CUDA, reason="the table is not there as a whole")
def test_the_decode_kernel_needs_table_rows_below_4_gib(gpu: Gpu, launches: Any) -> None:
    case = Case(id="wide-table", sequences=((1, 300),), dtype="float16", max_query_len=1)
    inputs, attributes = case.inputs(), case.attributes()
    assert [threads for _, threads, _ in launches(gpu.on_hopper(), case)] == [ZEROS, DECODE]
    table = np.lib.stride_tricks.as_strided(inputs.block_tables, (len(inputs.block_tables), 2**30))
    call, arrays = checked_call("paged_attention", inputs._replace(block_tables=table), attributes)
    results = [guarded(np.zeros(x.shape, x.dtype)) for x in call.results_on("cuda")]
    arrays = [x if x.shape == table.shape else guarded(x) for x in arrays]
    gpu.on_hopper().run(paged_attention, arrays, results, 0, **numbers(call))
    log = Path(os.environ["EMULATED_GPU_LAUNCHES"]).read_text().split("\n")[2:-1]
    assert [int(line.split()[1]) for line in log] == [PORTABLE, COMBINE]
    assert_close_on_cuda(results[0], inputs, attributes)


def test_more_kv_tiles_than_pipeline_stages(gpu: Gpu) -> None:
    """Work items of 5 or 6 KV tiles, also one after the other in one thread block. A sequence with so
    many rows is not split. A call does not count its items on from the one before."""
    case = Case(
        id="many-tiles",
        sequences=((129, 700),),
        num_heads=64,
        num_kv_heads=1,
        head_size=128,
        block_size=16,
        dtype="bfloat16",
    )
    inputs, attributes = case.inputs(), case.attributes()
    scratch = scratch_of(inputs, attributes)
    result = attend(gpu.on_hopper(), inputs, scratch=scratch, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    again = attend(gpu.on_hopper(), inputs, scratch=scratch, **attributes, seed=1)
    assert_same_bits(again, result)


@pytest.mark.skipif(ON_CUDA, reason="a GPU's driver does not refuse a tensor map on demand")
@pytest.mark.parametrize(
    ("head_size", "block_size", "more"),
    [
        (64, 16, {"kv_layout": "nbhd"}),
        (96, 32, {"kv_layout": "nhbd"}),
        (128, 48, {"kv_layout": "hnbd"}),
        (128, 128, {"sliding_window": 300}),
        (128, 16, {"value_head_size": 72}),
        (192, 16, {"kv_layout": "n2hbd", "soft_cap": 20.0}),
        (256, 16, {"kv_layout": "nbhd", "own_value_head_size": 192}),
        (256, 64, {"kv_layout": "2hnbd", "causal": False}),
    ],
    ids=["64", "96", "128", "window", "latent", "192", "narrow-v", "256"],
)
def test_tensor_copies_have_the_bits_of_others(
    head_size: int, block_size: int, more: dict[str, Any], gpu: Gpu, monkeypatch: Any
) -> None:
    """Tensor copies bring whole KV tiles of blocks of a multiple of 16 positions, unless the driver has
    no map for the cache. So they do with a block id outside the pool, which makes rows NaN."""
    case = Case(
        id="tensor-copies",
        sequences=(
            (130, 900),
            (40, 300),
        ),  # the first is not split: it has work items of 7 KV tiles
        num_heads=32,
        num_kv_heads=1,
        head_size=head_size,
        block_size=block_size,
        dtype="bfloat16",
        **more,
    )
    inputs, attributes = case.inputs(), case.attributes()
    results = [attend(gpu.on_hopper(), inputs, **attributes, seed=3)]
    assert_close_on_cuda(results[0], inputs, attributes)
    tables = next(n for n, x in enumerate(inputs) if x.ndim == 2 and x.dtype == I32)
    faulty = [np.array(x) for x in inputs]
    faulty[tables][[0, 1], 256 // block_size] = 10**6, -1
    results.append(attend(gpu.on_hopper(), faulty, **attributes))
    assert np.isnan(results[1].astype(F32)).any()
    monkeypatch.setenv("EMULATED_GPU_FAIL", "cuTensorMapEncodeTiled")
    assert_same_bits(attend(gpu.on_hopper(), inputs, **attributes), results[0])
    assert_same_bits(attend(gpu.on_hopper(), faulty, **attributes), results[1])


@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 70])
def test_a_kernel_for_plain_calls_has_the_bits_of_the_other(
    window: int | None, head_size: int, gpu: Gpu
) -> None:
    """A call that says of each sequence that it is causal takes the one for all features."""
    case = Case(
        id="plain",
        sequences=((129, 700), (2, 300), (1, 200)),  # the first is not split: it has plain turns
        num_heads=64,
        num_kv_heads=1,
        head_size=head_size,
        block_size=16,
        dtype="bfloat16",
        sliding_window=window,
        sinks=True,
        return_lse=True,
    )
    inputs, attributes = case.inputs(), case.attributes()
    plain = attend(gpu.on_hopper(), inputs, **attributes)
    assert_close_on_cuda(plain, inputs, attributes)
    attributes["causal"] = np.ones(len(inputs.context_lens), I32)
    for seed in (0, 1):
        assert_same_bits(attend(gpu.on_hopper(), inputs, **attributes, seed=seed), plain)


def test_a_scale_too_small_for_a_float(gpu: Gpu) -> None:
    """A query row is divided by a power of two, by which its scale is multiplied. That of a row of
    zeros is the smallest, and its scale is zero here. All warps take the same turns nevertheless."""
    case = Case(
        id="no-scale",
        sequences=((150, 700),),
        num_heads=2,
        num_kv_heads=1,
        head_size=128,
        dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
        scales="per head",
    )
    inputs, attributes = case.inputs(), case.attributes()
    inputs.query[20:30] = 0
    attributes["k_scale"] = np.full_like(attributes["k_scale"], 1e-12)
    result = attend(gpu.on_hopper(), inputs, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    assert_same_bits(attend(gpu.on_hopper(), inputs, **attributes, seed=1), result)


def test_groups_of_kv_heads(each_kernel: Gpu) -> None:
    """K and V of three kv heads do not fit the L2 cache: two are computed, then the third."""
    case = Case(
        id="groups",
        sequences=((66, 8300),),
        num_heads=3,
        num_kv_heads=3,
        head_size=256,
        dtype="bfloat16",
    )
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(each_kernel, inputs, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    assert_same_bits(attend(each_kernel, inputs, **attributes, seed=2), result)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_size", [24, 128, 184, 248])
@pytest.mark.parametrize("window", [None, 64])
def test_infinite_values_of_some_tokens(
    window: int | None, head_size: int, dtype: str, each_kernel: Gpu
) -> None:
    """Infinite values reach exactly the rows that attend to them: not those of earlier tokens, nor
    those of later ones with a window."""
    case = Case(
        id=f"infinite-{head_size}-{dtype}",
        sequences=((9, 70), (4, 300), (70, 200), (130, 130), (200, 257)),
        num_kv_heads=1,
        head_size=head_size,
        dtype=dtype,
        sliding_window=window,
    )
    inputs, attributes = case.inputs(), case.attributes()
    for s, (q_len, context) in enumerate(case.sequences):
        # With a window, half of the query tokens attend to the position.
        position = context - 3 if window is None else max(context - window - q_len // 2, 0)
        block, offset = divmod(position, case.block_size)
        value = inputs.kv_cache[inputs.block_tables[s, block], offset, 1]
        value[::3], value[1::5] = np.inf, -np.inf
        value[7] = np.nan
    result = attend(each_kernel, inputs, **attributes)
    with np.errstate(over="ignore"):  # the allowed error at an infinite value
        assert_close_on_cuda(result, inputs, attributes)
    for seed in (1, 2):
        assert_same_bits(attend(each_kernel, inputs, **attributes, seed=seed), result)


def test_whoever_comes_last_merges_the_splits(gpu: Gpu) -> None:
    """The thread blocks of a sequence and kv head end in any order. Each call finds other bytes in
    the scratch, or what another call has left there, of kernels for another GPU, too."""
    all_gpus, gpu = gpu, type(gpu)(gpu.native, "by GPU")
    case = Case(
        id="last",
        sequences=((1, 1300), (2, 600), (1, 40), (1, 700), (0, 9)),
        num_heads=4,
        head_size=16,
        block_size=16,
        dtype="bfloat16",
        max_query_len=2,
        sinks=True,
        return_lse=True,
        padding_tokens=3,
    )
    inputs, attributes = case.inputs(), case.attributes()
    inputs.block_tables[3, 20] = 10**6  # of a split in the middle
    expected = attend(gpu, inputs, **attributes)
    faulty = np.arange(len(inputs.query)) == 4
    for x in expected:
        assert (np.isnan(x.astype(F32)).all(axis=tuple(range(1, x.ndim))) == faulty).all()
    inputs.block_tables[3, 20] = 0
    assert_close_on_cuda(attend(gpu, inputs, **attributes), inputs, attributes)
    inputs.block_tables[3, 20] = 10**6
    rng, scratch = np.random.default_rng(0), scratch_of(inputs, attributes)
    for seed in range(1000 if selection.everything else 42):
        if rng.random() < 0.5:
            scratch[:] = rng.integers(256, size=len(scratch), dtype=np.uint8)
        each = all_gpus if rng.random() < 0.5 else gpu
        result = attend(each, inputs, scratch=scratch, seed=seed, **attributes)
        assert_same_bits(result, expected)


def test_runs_of_groups_are_merged_side_by_side(each_kernel: Gpu) -> None:
    """The leaves of each group of a long context are merged by the thread block that completes it,
    and the groups by another one."""
    case = Case(
        id="runs",
        sequences=((1, 18000), (2, 9000), (1, 4096), (1, 300)),
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        block_size=16,
        dtype="bfloat16",
        max_query_len=2,
        return_lse=True,
    )
    inputs, attributes = case.inputs(), case.attributes()
    expected = attend(each_kernel, inputs, **attributes)
    assert_close_on_cuda(expected, inputs, attributes)
    rng, scratch = np.random.default_rng(0), scratch_of(inputs, attributes)
    for seed in range(1, 200 if selection.everything else 8):
        scratch[:] = rng.integers(256, size=len(scratch), dtype=np.uint8)
        result = attend(each_kernel, inputs, scratch=scratch, seed=seed, **attributes)
        assert_same_bits(result, expected)


# Calls with neighbours that have their first blocks in common: one work item has the rows of up to 16
# query heads and tokens. The last four share none, or only until their windows leave the first position.
WITH_NEIGHBOURS: dict[str, dict[str, Any]] = {
    "16-sequences": {"num_heads": 1, "num_kv_heads": 1},
    "5-sequences": {"num_heads": 6, "block_size": 5},
    "4-sequences": {"num_heads": 4, "num_kv_heads": 1, "sinks": True, "dtype": "float16"},
    "2-sequences-int8": {"num_heads": 8, "num_kv_heads": 1, "cache_dtype": "int8"},
    "8-sequences-float8": {"num_heads": 4, "cache_dtype": "float8_e4m3fn", "scales": "per head"},
    "blocks-of-1": {"num_heads": 5, "num_kv_heads": 1, "block_size": 1},
    "16-heads": {"num_heads": 16, "num_kv_heads": 1},
    "window": {"num_heads": 2, "num_kv_heads": 1, "sliding_window": 800},
    "soft-cap": {"num_heads": 3, "num_kv_heads": 1, "soft_cap": 20.0},
    "latent": {"num_heads": 7, "num_kv_heads": 1, "value_head_size": 16},
}


def neighbours(rng: np.random.Generator, inputs: Any) -> None:
    """Gives a call new lengths and tables. A row begins as the one before it does, up to a block where
    it ends or differs. Some go on as the other row does, or have the same blocks in another order."""
    _, kv_cache, context_lens, tables, starts, num_seqs = inputs
    max_seqs, width = tables.shape
    most = width * kv_cache.shape[1]
    q_len = int(rng.integers(1, 3))
    q_lens = np.full(max_seqs, q_len) if rng.random() < 0.8 else rng.integers(0, 3, max_seqs)
    starts[1:] = np.cumsum(q_lens)
    num_seqs[...] = rng.integers(2, max_seqs + 1)
    context_lens[...] = q_lens + rng.integers(0, most - 1, max_seqs)
    if rng.random() < 0.7:
        context_lens[...] = np.maximum(context_lens, most * 2 // 3)
    context_lens[::3] = q_lens[::3] + most // 3  # before the blocks in common end
    for s in range(max_seqs):
        tables[s] = rng.permutation(len(kv_cache))[:width]
        if s == 0 or rng.random() < 0.15:
            continue
        same = int(width * rng.choice([0.1, 0.3, 0.6, 0.9, 1]))
        tables[s, :same] = tables[s - 1, :same]
        place = int(rng.integers(same - 1))
        match rng.integers(6):
            case 0:
                tables[s, [place, place + 1]] = tables[s, [place + 1, place]]
            case 1:
                tables[s, place] = rng.integers(len(kv_cache))
            case 2:
                tables[s, : same - 1] = tables[s - 1, 1:same]


@pytest.mark.skipif(ON_CUDA, reason="tests/backends/test_gpu.py captures calls there")
@pytest.mark.parametrize("name", WITH_NEIGHBOURS)
def test_neighbours_have_the_bits_of_each_alone(name: str, each_kernel: Gpu) -> None:
    """Whatever they have in common. Lengths and tables change between the replays of a graph."""
    sizes: dict[str, Any] = {"head_size": 32, "block_size": 16, "dtype": "bfloat16"}
    sizes |= {"max_query_len": 2, "return_lse": True} | WITH_NEIGHBOURS[name]
    # More than are counted at a time, or fewer.
    num_seqs = 36 if name == "16-sequences" else 9
    case = Case(id=name, sequences=((2, 1120),) * num_seqs, padding_seqs=0, **sizes)
    call = ChangingCall(case)
    inputs = type(case.inputs())(*(call.named[x] for x in case.inputs()._fields))
    if case.cache_dtype is None:
        inputs.kv_cache[~np.isfinite(inputs.kv_cache.astype(F32))] = 0
    attributes = case.attributes()
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    assert isinstance(each_kernel, EmulatedGpu)

    def run(seed: int) -> None:
        each_kernel.run(call.op, call.arrays, call.results, seed, **numbers(call.call))

    with ExitStack() as graphs:
        captured = (each_kernel.captured(partial(run, seed)) for seed in range(4))
        replays = [graphs.enter_context(x) for x in captured]  # 1, 3, 7 and all thread blocks
        for _ in range(50 if selection.everything else 2):  # 1,000 batches of all names, or 40
            neighbours(rng, inputs)
            alone = [
                attend(each_kernel, one_sequence(inputs, s), **attributes)
                for s in range(int(inputs.num_seqs))
            ]
            for replay in replays:
                for x in call.results:
                    x.view(np.uint8)[...] = 0xFF
                replay(int(rng.integers(100)))
                for s, expected in enumerate(alone):
                    rows = slice(*inputs.query_start_loc[s : s + 2])
                    assert_same_bits(tuple(x[rows] for x in call.results[:2]), expected)


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_500_calls_over_the_same_scratch(cache_dtype: str | None, gpu: Gpu) -> None:
    """Before each call the scratch has other bytes, as a graph that is replayed may find it."""
    gpu = gpu.on_hopper()
    case = Case(
        id="replay",
        sequences=((1, 140), (1, 270)),
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        block_size=16,
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        max_query_len=1,
        padding_tokens=3,  # more tokens than the table has rows: each has a part of the scratch
    )
    inputs, attributes = case.inputs(), case.attributes()
    expected = attend(gpu, inputs, **attributes)
    assert_close_on_cuda(expected, inputs, attributes)
    rng, scratch = np.random.default_rng(0), scratch_of(inputs, attributes)
    for seed in range(500):
        scratch[:] = rng.integers(256, size=len(scratch), dtype=np.uint8)
        result = attend(gpu, inputs, scratch=scratch, seed=seed, **attributes)
        assert_same_bits(result, expected)


BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
SEQUENCES = {"decode": ((1, 700), (1, 40)), "prefill": ((70, 330), (1, 700), (20, 300))}
CALLS_TO_CAPTURE: dict[str, tuple[str, list[Case | UpdateCase], list[int] | None]] = {
    name: (
        kernels,
        [
            Case(
                id=f"graph-{name}-{n}",
                sequences=order,
                num_heads=16,
                head_size=128,
                block_size=16,
                max_query_len=max(q_len for q_len, _ in order),
                return_lse=True,
                **fields,
            )
            for n, order in enumerate((sequences, sequences[::-1], sequences[1:] + sequences[:1]))
        ],
        launched,
    )
    for name, kernels, sequences, fields, launched in (
        ("decode", "by GPU", SEQUENCES["decode"], BFLOAT16, [ZEROS, DECODE]),
        ("prefill", "by GPU", SEQUENCES["prefill"], BFLOAT16, [ZEROS, DECODE, HOPPER, COMBINE]),
        ("portable-decode", "portable", SEQUENCES["decode"], BFLOAT16, [ZEROS, DECODE]),
        ("portable", "portable", SEQUENCES["prefill"], BFLOAT16,
         [ZEROS, DECODE, PORTABLE, PORTABLE, COMBINE]),
        ("float32", "by GPU", SEQUENCES["prefill"], {"dtype": "float32"}, [PORTABLE, COMBINE]),
        ("nvfp4", "by GPU", SEQUENCES["decode"], BFLOAT16 | NVFP4, [PORTABLE, COMBINE]),
    )
} | {
    f"update-{name}": ("by GPU", [replace(case, id=f"graph-{n}") for n in range(3)], None)
    for name, case in {
        "plain": UpdateCase("", dtype="bfloat16", head_size=128),
        "nvfp4": UpdateCase("", head_size=32, made_scales=("k_scale", "v_scale"), **NVFP4),
        "rotated-int8": UpdateCase("", cache_dtype="int8", scales="per position", head_size=16,
                                   rotary_dim=16, num_heads=4),
        "normalized-rotated": UpdateCase("", dtype="bfloat16", head_size=64, rotary_dim=64,
                                         num_heads=4, norm="per head", v_norm=True),
    }.items()
}  # fmt: skip
"""The kernels that are chosen, three calls that differ in the content of their arrays, and the
threads of the kernels that a call launches."""


@pytest.mark.skipif(ON_CUDA, reason="tests/backends/test_gpu.py captures calls there")
@pytest.mark.parametrize("name", CALLS_TO_CAPTURE)
def test_a_graph_replays_a_call(
    name: str, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the arrays hold when it is replayed, and nothing of the call that was captured:
    that one's arguments and tensor maps are gone, and their memory has others of another call."""
    kernels, cases, threads = CALLS_TO_CAPTURE[name]
    captured, *others = map(ChangingCall, cases)
    gpu = type(gpu)(gpu.native, kernels)
    assert isinstance(gpu, EmulatedGpu)
    log = tmp_path / "launches"
    log.write_text("")
    monkeypatch.setenv("EMULATED_GPU_LAUNCHES", str(log))

    def run(call: ChangingCall) -> None:
        gpu.run(call.op, call.arrays, call.results, 0, **numbers(call.call))

    with gpu.captured(lambda: run(captured)) as replay:
        assert log.read_text() == ""
        for seed, other in enumerate(others):
            for x in captured.results:
                x.view(np.uint8)[...] = 0xFF
            for x, content in zip(captured.arrays, other.arrays, strict=True):
                x[...] = content
            run(other)
            log.write_text("")
            replay(seed)
            launched = [int(line.split()[1]) for line in log.read_text().splitlines()]
            assert launched == threads if threads else len(launched) == 1
            written = slice(len(other.call.results))  # without the scratch
            assert_same_bits(tuple(captured.results[written]), tuple(other.results[written]))


@pytest.mark.parametrize(
    ("block_size", "context", "q_len"), [(5, 4200, 1), (16, 16500, 1), (5, 4200, 20)]
)
def test_more_block_ids_than_a_warp_loads_at_once(
    block_size: int, context: int, q_len: int, gpu: Gpu
) -> None:
    """Splits of 256 and of 640 positions. A load of the decode kernel brings the ids of 8 KV tiles, or
    of 32 blocks; a load of the kernel for more rows those of 2 tiles of 64 positions."""
    case = Case(
        id="ids",
        sequences=((q_len, context),),
        num_heads=8,
        num_kv_heads=8,
        head_size=16,
        block_size=block_size,
        dtype="bfloat16",
    )
    inputs, attributes = case.inputs(), case.attributes()
    kernels = gpu.on_hopper() if q_len == 1 else gpu
    result = attend(kernels, inputs, **attributes, seed=20)
    assert_close_on_cuda(result, inputs, attributes)


@pytest.mark.parametrize("context", [60, 700], ids=["one-split", "splits"])
def test_attention_begins_when_the_update_has_ended(context: int, each_kernel: Gpu) -> None:
    """A step writes keys and values and then reads them. The second kernel begins early."""
    case = Case(id="step", sequences=((1, context),), dtype="bfloat16", unused_blocks=0)
    inputs, attributes = case.inputs(), case.attributes()
    expected = attend(each_kernel, inputs, **attributes)
    cache = guarded(inputs.kv_cache)
    block, offset = divmod(context - 1, case.block_size)
    block = inputs.block_tables[0, block]
    rows = [guarded(cache[block, offset, i::2][None]) for i in range(2)]
    cache[block, offset] = np.nan
    slots = guarded(np.array([block * case.block_size + offset], np.int64))
    each_kernel.run(kv_cache_update, [cache, *rows, slots], [cache], 0)
    call, (_, _, *others) = checked_call("paged_attention", inputs, attributes)
    arrays = [guarded(inputs.query), cache, *map(guarded, others)]
    result = guarded(np.full(call.results[0].shape, np.nan, expected.dtype))
    scratch = scratch_of(inputs, attributes)
    each_kernel.run(paged_attention, arrays, [result, scratch], 0, **numbers(call))
    assert_same_bits(result, expected)


NO_CHOICE = (
    "the choice of CUDA kernels (XLA_GPU_CUDA_KERNELS) must be one of by GPU, portable; got volta. "
    "Unset it for by GPU"
)

CHOICES = """
import ctypes, sys
from tests.support import native

class String(ctypes.Structure):  # std::string
    _fields_ = [("text", ctypes.c_char_p), ("rest", ctypes.c_char * 24)]

library, module = sys.argv[1:]
choice = ctypes.CDLL(library)["_ZN7xla_gpu15paged_attention10CudaChoiceB5cxx11Ev"]
choice.restype = None
choice(ctypes.byref(string := String()))
print(string.text.decode(), flush=True)
print(native.load(module, "x._native").cuda_choice())
"""


@pytest.mark.skipif(ON_CUDA, reason="the same on the emulated GPU")
@pytest.mark.parametrize("value", ["", "portable", "by GPU", "volta"])
def test_the_environment_chooses_the_kernels(value: str, gpu: Gpu, tmp_path: Path) -> None:
    """It does so for Python and for a program without it."""
    module, setting = Path(gpu.native.__file__), {"XLA_GPU_CUDA_KERNELS": value}
    (library,) = module.parent.glob("libxla_paged_attention*.so")
    program = without_python.compile_program(library, tmp_path)
    ops = ("paged_attention", "varlen_attention")
    *errors, _ = without_python.errors(program, "cuda", *ops, **setting)
    choices = scripts.run(CHOICES, str(library), str(module), **setting)
    if value == "volta":
        assert errors == [f"{op}: {NO_CHOICE}" for op in ops]
        assert choices.stdout == "unknown\n"
        assert choices.stderr.endswith(f"ImportError: shared_ffi: {NO_CHOICE}\n")
    else:
        assert all("operand query is missing" in x for x in errors)
        assert choices.stdout == f"{value or 'by GPU'}\n" * 2, choices.stderr


def test_an_unknown_choice_is_refused(gpu: Gpu) -> None:
    with pytest.raises(ValueError, match=re.escape(f"shared_ffi: {NO_CHOICE}")):
        gpu.native.set_cuda_choice("volta")


def with_long_queries(case: Case) -> Case:
    """A longer version of a case. It has long queries if the case has many queries."""
    head_size = case.head_size % 16 * 8 + 8
    if case.cache_dtype is not None:
        head_size = case.head_size % 8 * 16 + 16
    groups = case.groups
    if groups is not None:
        groups = replace(groups, size=math.gcd(groups.size, head_size))
    return replace(
        case,
        sequences=tuple((3 * q_len, 3 * context) for q_len, context in case.sequences),
        max_query_len=case.max_query_len and 3 * case.max_query_len,
        head_size=head_size,
        value_head_size=case.value_head_size and min(case.value_head_size, head_size),
        dtype="bfloat16" if case.dtype == "float32" else case.dtype,
        scales="per head" if case.scales == "per position" else case.scales,
        groups=groups,
    )


@given(case=attention_cases().map(with_long_queries))
def test_random_long_queries(each_kernel: Gpu, case: Case) -> None:
    test_paged_attention(case, each_kernel)


@given(case=attention_cases())
def test_random_on_hopper(gpu: Gpu, case: Case) -> None:
    test_paged_attention(case, gpu.on_hopper())


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_paged_attention(case: Case, gpu: Gpu) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(gpu, inputs, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    own_seed = zlib.crc32(case.id.encode()) % 900 + 3  # all cases together try many orders
    for seed in (own_seed, 1, 2, 3) if selection.everything else (own_seed,):
        assert_same_bits(attend(gpu, inputs, **attributes, seed=seed), result)


WIDE_HEADS = {
    "latent": [(576, 512), (512, 512), (264, 200), (448, 296)],
    "own": [(512, 512), (264, 264), (512, 320), (448, 96)],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("num_heads", [4, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "sizes"), [(kind, sizes) for kind in WIDE_HEADS for sizes in WIDE_HEADS[kind]], ids=str
)
def test_wide_heads(
    kind: str, sizes: tuple[int, int], dtype: str, num_heads: int, gpu: Gpu
) -> None:
    """On tensor cores, but for GPUs with little shared memory. The kernel for CUDA cores, which also
    takes queries that are not aligned, rounds otherwise. V is a part of K, or has an array."""
    head_size, value_head_size = sizes
    columns = {"latent": "value_head_size", "own": "own_value_head_size"}[kind]
    case = Case(
        id=f"wide-{kind}-{num_heads}-{sizes}-{dtype}",
        sequences=((1, 600), (5, 70)),
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=head_size,
        kv_layout="nbhd" if kind == "own" else None,
        dtype=dtype,
        return_lse=True,
        **{columns: value_head_size},
    )
    inputs, attributes = case.inputs(), case.attributes()
    block, offset = divmod(68, case.block_size)
    slot = inputs.block_tables[1, block], offset  # of the last two tokens alone
    values = attributes.get("value_cache", inputs.kv_cache)
    values[slot][..., value_head_size - 3] = np.inf
    values[slot][..., 5] = np.nan
    result = attend(gpu, inputs, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    assert_same_bits(attend(gpu, inputs, **attributes, seed=1), result)
    on_cuda_cores = attend(gpu, inputs, **attributes, more_columns=3)
    assert (on_cuda_cores[0] != result[0]).any()
    if not ON_CUDA:
        small = type(gpu)(gpu.native, "portable", capability=120)
        assert_same_bits(attend(small, inputs, **attributes), on_cuda_cores)


@given(case=attention_cases())
def test_random(gpu: Gpu, case: Case) -> None:
    test_paged_attention(case, gpu)


def test_kv_cache_update_of_slots_past_the_end(gpu: Gpu) -> None:
    case = next(case for case in UPDATE_CASES if case.id == "some-padding-int64-f32")
    kv_cache, key, value, slots = case.inputs()
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    faulty = slots.copy()
    faulty[np.flatnonzero(slots >= 0)[:2]] = [num_slots, 2**62]
    expected = reference.kv_cache_update(
        kv_cache, key, value, np.where(faulty < num_slots, faulty, -1)
    )
    updated = guarded(kv_cache)
    gpu.run(kv_cache_update, [updated, key, value, faulty], [updated], 0)
    assert_same_bits(updated, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_cache_update_of_positions_without_a_row(dtype: str, gpu: Gpu) -> None:
    """Key and value are not written. The query is NaN, or with a negative slot as it was."""
    case = UpdateCase("rotated-faulty", rotary_dim=16, num_heads=4, head_size=24, dtype=dtype)
    inputs, attributes = case.inputs(), case.attributes()
    positions = attributes["positions"]
    with_slots = np.flatnonzero(inputs.slot_mapping >= 0)
    positions[with_slots[:3]] = [-1, len(attributes["cos_sin_cache"]), 2**31 - 1]
    slots = inputs.slot_mapping.copy()
    slots[with_slots[3]] = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1]  # past the end
    call, arrays = checked_call("kv_cache_update", inputs._replace(slot_mapping=slots), attributes)
    arrays = [guarded(x) for x in arrays]
    updated = [arrays[operand] for operand, _ in call.aliases]
    gpu.run(kv_cache_update, arrays, updated, 0, **numbers(call))
    slots[with_slots[:4]] = -1
    expected = reference.kv_cache_update(*inputs._replace(slot_mapping=slots), **attributes)
    assert_same_bits(updated[0], expected[0])
    assert np.isnan(updated[1][with_slots[:3]].astype(F32)).all()
    others = np.setdiff1d(np.arange(len(slots)), with_slots[:3])
    assert_same_bits(updated[1][others], expected[1][others])


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1000])
def test_simple_add(size: int, gpu: Gpu) -> None:
    a = guarded(np.arange(size, dtype=F32))
    result = guarded(np.full_like(a, np.nan))
    gpu.run(simple_add, [a, a], [result], 0)
    assert_same_bits(result, a + a)


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "float8_e5m2"])
def test_nan_value_with_finite_key(cache_dtype: str | None, gpu: Gpu) -> None:
    """A NaN value reaches exactly the rows that attend to it, though its key is finite."""
    case = Case(
        id=f"nan-value-{cache_dtype}",
        sequences=((9, 9), (70, 70)),
        cache_dtype=cache_dtype,
        dtype="bfloat16",
    )
    inputs, attributes = case.inputs(), case.attributes()
    for s, position in ((0, 5), (1, 60)):
        block = inputs.block_tables[s, position // case.block_size]
        inputs.kv_cache[block, position % case.block_size, 1::2] = np.nan
    result = attend(gpu, inputs, **attributes)
    assert np.isnan(result[5].astype(F32)).all() and not np.isnan(result[4].astype(F32)).any()
    assert_close_on_cuda(result, inputs, attributes)


@pytest.mark.pairwise
@pytest.mark.parametrize("head_size", [64, 256])
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "e2m1"])
@pytest.mark.parametrize("max_query_len", [1, 2, 9, 1000])
def test_bits_do_not_depend_on_max_query_len(
    max_query_len: int, cache_dtype: str | None, head_size: int, each_kernel: Gpu
) -> None:
    sequences = ((1, 700), (2, 300), (9, 9), (100, 120))
    case = Case(
        id=f"hint-{max_query_len}-{cache_dtype}-{head_size}",
        sequences=tuple((min(q_len, max_query_len), context) for q_len, context in sequences),
        num_heads=12,
        head_size=head_size,
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        padding_tokens=50,
    )
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(each_kernel, inputs, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    assert_same_bits(attend(each_kernel, inputs, **attributes, max_query_len=max_query_len), result)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_query_len", [2**63 - 1, 2**62, 2**31])
def test_the_largest_max_query_len(max_query_len: int, dtype: str, each_kernel: Gpu) -> None:
    """With 8 query heads, a bound that overflowed left no thread block to launch."""
    case = Case(
        id="largest-hint",
        sequences=((5, 40), (3, 9)),
        num_heads=8,
        num_kv_heads=1,
        head_size=64,
        dtype=dtype,
    )
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(each_kernel, inputs, **attributes)
    assert_same_bits(attend(each_kernel, inputs, **attributes, max_query_len=max_query_len), result)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sequences",
    [BATCH, [(1, 70), (3, 60), (2, 9), (40, 50), (90, 90)]],
    ids=["splits", "one-split"],
)
def test_more_queries_than_max_query_len(sequences: Any, dtype: str, each_kernel: Gpu) -> None:
    """Also with contexts that are not split: there is no memory that too many rows would overflow."""
    inputs, starts = batch(dtype, sequences)
    sound = attend(each_kernel, inputs, scale=0.2)
    result = attend(each_kernel, inputs, scale=0.2, max_query_len=3)
    assert np.isnan(result[starts[3] : starts[5]].astype(F32)).all()
    assert_same_bits(result[: starts[3]], sound[: starts[3]])
    assert_same_bits(result[starts[5] :], sound[starts[5] :])


@pytest.mark.parametrize("num_heads", [1, 2, 16, 71, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_splits_of_many_heads(num_heads: int, dtype: str, gpu: Gpu) -> None:
    """A token with more heads than the rows of a work item needs several items, each split over
    KV."""
    case = Case(
        id=f"splits-{num_heads}-{dtype}",
        sequences=((1, 1100), (2, 530), (1, 128), (1, 129)),
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=16,
        block_size=32,
        dtype=dtype,
    )
    inputs, attributes = case.inputs(), case.attributes()
    assert_close_on_cuda(attend(gpu, inputs, **attributes), inputs, attributes)


def partials_and_arrivals(
    num_tokens: int,
    max_seqs: int,
    capacity: int,
    *,
    num_kv_heads: int,
    tile_tokens: int,
    few_tokens: int,
) -> tuple[int, int, int]:
    """The most splits of a token, the partial results in the scratch, and the arrivals of a sequence
    and kv head, as scratch.h states them. `tile_tokens`: of a query tile. `few_tokens`: the most of
    the decode kernel."""
    most_splits, groups = max(32, 256 // num_kv_heads), -(-capacity // 8192) + 1
    most_groups = max(128, most_splits)
    splits = max(min(most_splits, -(-capacity // 256) + 1), min(groups, most_groups))
    partials = min(num_tokens * splits, max_seqs * tile_tokens * max(most_splits, splits))
    tokens = min(num_tokens, max_seqs * few_tokens)
    leaves = min(-(-capacity // 512) + 3, capacity // 257 * 4)
    slots = max(tokens * min(groups, 128), 36864 // num_kv_heads)
    return splits, max(partials, min(tokens * leaves, slots)), 1 + min(groups, 16)


@pytest.mark.pairwise
@pytest.mark.parametrize("padding_tokens", [0, 1000])
@pytest.mark.parametrize(
    ("q_len", "splits"), [(2, 11), (64, 11), (100, 11), (1000, 1)], ids=lambda x: str(x)
)
def test_splits_of_long_queries(
    q_len: int, splits: int, padding_tokens: int, each_kernel: Gpu
) -> None:
    """A sequence with few query tiles has enough splits to fill a GPU, as decoding has."""
    case = Case(
        id=f"splits-of-{q_len}",
        sequences=((q_len, 4500), (1, 300)),
        num_heads=4,
        num_kv_heads=1,
        head_size=8,
        block_size=64,
        dtype="bfloat16",
        sinks=True,
        padding_tokens=padding_tokens,
    )
    inputs, attributes = case.inputs(), case.attributes()
    scratch = scratch_of(inputs, attributes)
    seed = 20  # of 132 multiprocessors: each split of the decode kernel is another thread block's
    result = attend(each_kernel, inputs, scratch=scratch, seed=seed, **attributes)
    assert_close_on_cuda(result, inputs, attributes)
    num_tokens, (max_seqs, max_blocks_per_seq) = len(inputs.query), inputs.block_tables.shape
    tokens_per_tile, capacity = 32, max_blocks_per_seq * case.block_size
    _, partials, per_head = partials_and_arrivals(
        num_tokens, max_seqs, capacity, num_kv_heads=1, tile_tokens=16, few_tokens=4
    )
    num_flags = num_tokens + partials
    words = scratch[: 4 * (num_flags + 1 + max_seqs * per_head)].view(I32)
    flags, arrivals = words[num_tokens:num_flags], words[num_flags + 1 :].reshape(-1, per_head)
    assert arrivals[1, 0] == 2
    if q_len > 4:
        tiles = -(-q_len // tokens_per_tile)
        assert np.count_nonzero(flags == 0) == (tiles * splits if splits > 1 else 0)
    else:
        assert arrivals[0, 0] == splits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("past_the_limit", [0, 1, 1023])
def test_the_longest_context(past_the_limit: int, dtype: str, each_kernel: Gpu) -> None:
    """With 2**31 - 128 positions or more, the numbers of positions overflowed: the kernel for
    float32 never ended, and others left out the last KV tile."""
    case = Case(
        id="longest",
        sequences=((3, 65600), (70, 65600)),
        num_kv_heads=1,
        block_size=2**16,
        dtype=dtype,
        sliding_window=100,
        padding_tokens=0,
        unused_blocks=0,
    )
    inputs, attributes = case.inputs(), case.attributes()
    capacity = 2**31 - 1024
    blocks = np.tile(inputs.block_tables[:, :2], (1, 2**14))
    longest = np.full_like(inputs.context_lens, capacity)
    near = np.where(longest % 2**16 < 100, 0, longest % 2**16) + 2**16
    expected = attend(each_kernel, inputs._replace(context_lens=near), **attributes)
    lengths = longest + I32(past_the_limit)
    result = attend(
        each_kernel, inputs._replace(context_lens=lengths, block_tables=blocks), **attributes
    )
    if past_the_limit:
        assert np.isnan(result.astype(F32)).all()
    else:
        assert_same_bits(result, expected)


def test_more_sequences_than_threads(gpu: Gpu) -> None:
    rng = np.random.default_rng(0)
    lengths = [(int(q), int(q + rng.integers(0, 9))) for q in rng.integers(0, 3, 300)]
    case = Case(id="300-sequences", sequences=tuple(lengths), head_size=8, dtype="bfloat16")
    inputs, attributes = case.inputs(), case.attributes()
    assert_close_on_cuda(attend(gpu, inputs, **attributes), inputs, attributes)


def faulty_metadata() -> dict[str, tuple[dict[int, Any], list[int]]]:
    """Changes of `batch`, by operand, and the sequences whose rows must become NaN."""
    everything = list(range(len(BATCH)))
    huge, negative = 2**31 - 1, -(2**31)
    return {
        "block-id-past-the-end": ({3: [((1, 20), 10**6)]}, [1]),
        "block-id-negative": ({3: [((0, 0), -1)]}, [0]),
        "block-id-of-an-early-split": ({3: [((2, 1), huge)]}, [2]),
        "block-id-in-a-chunk": ({3: [((3, 5), negative)]}, [3]),
        "block-id-that-only-the-last-row-needs": ({3: [((4, 5), 10**9)]}, [4]),
        "context-past-the-table": ({2: [((2,), huge)]}, [2]),
        "context-negative": ({2: [((0,), negative)]}, [0]),
        "context-shorter-than-the-query": ({2: [((3,), 39)]}, [3]),
        "two-sequences": ({2: [((1,), -1)], 3: [((4, 0), -5)]}, [1, 4]),
        "start-decreases": ({4: [((3,), 0)]}, [2, 3, 4]),
        "start-past-the-tokens": ({4: [((5,), huge)]}, [4]),
        "first-start-negative": ({4: [((0,), negative)]}, everything),
        "num-seqs-negative": ({5: [((), -1)]}, everything),
        "num-seqs-past-max-seqs": ({5: [((), 1000)]}, everything),
        "num-seqs-huge": ({5: [((), huge)]}, everything),
    }


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", faulty_metadata())
def test_faulty_metadata(what: str, dtype: str, each_kernel: Gpu) -> None:
    """Faulty metadata never causes a read outside the arrays. It makes the rows of its sequences
    NaN, even beside a sink that takes all of the weight, and leaves the bits of all others."""
    inputs, starts = batch(dtype)
    attributes: dict[str, Any] = {
        "scale": 0.2,
        "return_lse": True,
        "sinks": np.array([np.inf, -np.inf, 0.5, 3e38, -1, 0], F32),
    }
    sound, sound_lse = attend(each_kernel, inputs, **attributes)
    changes, lost = faulty_metadata()[what]
    faulty = [np.array(x) for x in inputs]
    for operand, entries in changes.items():
        for index, value in entries:
            faulty[operand][index] = value
    result, lse = attend(each_kernel, faulty, **attributes)
    expected = np.array(sound)
    for s in lost:
        expected[starts[s] : starts[s + 1]] = np.nan
    if 4 in changes or 5 in changes:  # padding cannot be recognized either
        expected[starts[lost[0]] :] = np.nan
    rows_lost = np.isnan(expected.astype(F32)).all(axis=(1, 2))
    assert np.isnan(result[rows_lost].astype(F32)).all() and np.isnan(lse[rows_lost]).all()
    assert_same_bits(result[~rows_lost], expected[~rows_lost])
    assert_same_bits(lse[~rows_lost], sound_lse[~rows_lost])


def test_a_bad_block_id_is_of_one_sequence(gpu: Gpu) -> None:
    """A KV tile of 8 bits has two blocks of 16 positions. Where a sequence ends with the first one, a
    lane still has the id of the sequence before, which the same thread block computed."""
    inputs, _ = batch("bfloat16", [(1, 32), (1, 16)], cache_dtype="float8_e4m3fn")
    sound = attend(gpu.on_hopper(), inputs, scale=0.2, seed=1)
    inputs[3][0, 1] = 10**6
    result = attend(gpu.on_hopper(), inputs, scale=0.2, seed=1)
    assert np.isnan(result[0].astype(F32)).all()
    assert_same_bits(result[1:], sound[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_faulty_trees(dtype: str, each_kernel: Gpu) -> None:
    """Bits past a sequence's tokens, or of a long sequence, make the rows of the sequence NaN."""
    sequences = ((7, 150), (64, 700), (3, 3), (80, 90))
    case = Case(id="trees", sequences=sequences, dtype=dtype, tree="draft")
    inputs, attributes = case.inputs(), case.attributes()
    trees = attributes.pop("tree_mask")
    sound = attend(each_kernel, inputs, tree_mask=trees, **attributes)
    starts = np.cumsum([0, *(q_len for q_len, _ in sequences)])
    for s, token, word in ((0, 6, 1 << 7), (2, 0, 1 << 3), (3, 79, 1)):
        faulty = trees.copy()
        faulty[starts[s] + token] |= (word, 0)
        result = attend(each_kernel, inputs, tree_mask=faulty, **attributes)
        rows = slice(starts[s], starts[s + 1])
        assert np.isnan(result[rows].astype(F32)).all()
        result[rows] = sound[rows]
        assert_same_bits(result, sound)


@pytest.mark.pairwise
@pytest.mark.skipif(ON_CUDA, reason="an operand on a GPU is not the memory of a result")
@pytest.mark.parametrize("q_len", [1, 70])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lengths_that_change_during_the_call(
    dtype: str, q_len: int, each_kernel: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lengths lie in the memory of the result. The first sequence's row of ones makes them
    1,006,648,192 or more, after they were checked, and before the second sequence uses them."""
    monkeypatch.setenv("EMULATED_GPU_EARLY", "0")  # the second kernel reads them, too
    monkeypatch.setenv("EMULATED_GPU_RACES", "0")
    inputs = Case("", ((q_len, q_len), (q_len, q_len)), dtype=dtype, num_heads=1, num_kv_heads=1)
    operands = [guarded(x) for x in inputs.inputs()]
    operands[1][...] = 1
    call, _ = checked_call("paged_attention", operands, {"scale": 0.5})
    output = guarded(np.zeros(call.results[0].shape, dtype))
    for place, first in ((2, 0), (4, 2)):
        lengths = output.reshape(-1).view(I32)[first : first + len(operands[place])]
        lengths[:] = operands[place]
        operands[place] = lengths
    scratch = guarded(np.full(call.results_on("cuda")[-1].shape, 0xFF, np.uint8))
    each_kernel.run(paged_attention, operands, [output, scratch], 0, **numbers(call))
    # A row may be wrong, or as it was: no work item may have it. Nothing outside of the arrays is read.
    assert (np.isnan(output) | (output == 1) | (output == 0)).all()


HALF = {"head_size": 128, "block_size": 16, "dtype": "bfloat16"}
MANY = tuple((20 if s % 60 == 7 else 0, 40) for s in range(300))  # more than are counted at a time
MANY_LONG = tuple((40 if s % 60 == 7 else 0, 40) for s in range(300))
BATCHES = {
    "DecodeAttention": [((1, 900), (2, 300), (0, 7), (1, 70)), ((3, 700),)],
    "PrefillAttention": [((20, 150), (1, 90), (70, 90)), MANY],
    "TensorCoreAttention": [((1, 600), (20, 130), (0, 7), (3, 70)), MANY],
    "TensorCorePrefill": [((70, 150), (1, 90), (40, 90)), MANY_LONG],
    "CudaCoreAttention": [((1, 600), (5, 50), (0, 7), (3, 70)), MANY],
    "Combine": [((1, 600), (5, 50), (0, 7), (2, 530)), MANY],
}
FEATURES_THAT_CHANGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 200},
    "ranges": {"ranges": "any"},
    "tree": {"tree": "any"},
    "causal": {"causal": False, "causal_seqs": True},
    "int8": {"cache_dtype": "int8", "scales": "per head"},
    "nvfp4": NVFP4,
}
CASES_THAT_CHANGE: dict[str, list[Case | UpdateCase]] = {
    kernel: [
        Case(
            id=f"changes-{name}-{len(sequences)}",
            sequences=sequences,
            **(dict(HALF, dtype="float32", head_size=16) if kernel == "CudaCoreAttention" else HALF),
            **feature,
        )
        for sequences in batches
        for name, feature in FEATURES_THAT_CHANGE.items()
        if sequences not in (MANY, MANY_LONG) or name in ("plain", "window", "causal")
        if name != "nvfp4" or kernel == "CudaCoreAttention"
    ]
    for kernel, batches in BATCHES.items()
} | {
    "Update": [
        UpdateCase(id="changes", dtype="bfloat16", head_size=128),
        UpdateCase(id="changes-int8", cache_dtype="int8", scales="per position"),
        UpdateCase(id="changes-int4", cache_dtype="int4", scales="one", head_size=18),
        UpdateCase(id="changes-nvfp4", head_size=32, made_scales=("k_scale", "v_scale"), **NVFP4),
        UpdateCase(id="changes-rotated", head_size=16, rotary_dim=16, num_heads=4),
        UpdateCase(id="changes-64-bits", head_size=16, rotary_dim=16, slot_dtype="int64",
                   position_dtype="int64"),
    ]
}  # fmt: skip
LARGEST = {
    "context_lens": 1000,
    "block_tables": 90,
    "query_start_loc": 110,
    "num_seqs": len(MANY),
    "tree_mask": 31,
    "bidirectional_ranges": 1000,
    "causal": 1,
    "slot_mapping": 30,
    "positions": 20,
}
"""The arrays whose numbers change, and the largest number that most of them become."""


class ChangingCall:
    """A call of which a number changes while a kernel reads it."""

    def __init__(self, case: Case | UpdateCase) -> None:
        self.op: Any = paged_attention if isinstance(case, Case) else kv_cache_update
        inputs, attributes = case.inputs(), case.attributes()
        self.call, arrays = checked_call(self.op.OP, inputs, attributes)
        self.arrays = [guarded(x) for x in arrays]
        names = [*inputs._fields, *(name for name in FEATURES[self.op.OP] if name in attributes)]
        self.named = dict(zip(names, self.arrays, strict=True))
        places = in_place(self.call)
        self.results = [
            self.arrays[places[i]] if i in places else guarded(np.zeros(spec.shape, spec.dtype))
            for i, spec in enumerate(self.call.results_on("cuda"))
        ]
        self.read = [x for x in self.arrays if id(x) not in {id(y) for y in self.results}]
        self.counts: dict[tuple[str, int], int] = {}

    def run(self, gpu: EmulatedGpu, kernel: str, name: str, seed: int, **fields: int) -> int:
        """Returns how often the kernel read the array."""
        array = self.named[name]
        right = [x.copy() for x in self.read]
        try:
            with gpu.change(kernel, array, **fields) as change:
                gpu.run(self.op, self.arrays, self.results, seed, **numbers(self.call))
                return int(change.counted)
        finally:
            for x, before in zip(self.read, right, strict=True):
                assert x is array or x.tobytes() == before.tobytes()
                x[...] = before

    def run_with_a_change(self, gpu: EmulatedGpu, kernel: str, rng: np.random.Generator) -> None:
        """One number changes once, or back and forth."""
        name = rng.choice([name for name in self.named if name in LARGEST])
        seed = int(rng.choice((3, 4, 5, 6) if selection.everything else (4, 6)))
        if (name, seed) not in self.counts:
            self.counts[name, seed] = self.run(gpu, kernel, name, seed)
        count = self.counts[name, seed]
        array = self.named[name]
        value = rng.integers(LARGEST[name] + 1) if rng.random() < 0.8 else rng.choice(JUNK)
        fields = {
            "place": rng.integers(array.size, size=2).min(),  # the last entries are padding
            "reads": 1 + rng.integers(max(count, 1)),
            "every": rng.choice([0, 1, 7, 32, 33]),
            "value": int(value) % 2**64,
        }
        self.run(gpu, kernel, name, seed, **{field: int(x) for field, x in fields.items()})


@pytest.mark.skipif(ON_CUDA, reason="only the emulated GPU changes numbers between two reads")
@pytest.mark.parametrize("kernel", CASES_THAT_CHANGE)
def test_numbers_that_change_during_the_call(kernel: str, gpu: Gpu, monkeypatch: Any) -> None:
    """Rows may be wrong then. But each kernel ends, and touches nothing outside of its arrays."""
    monkeypatch.setenv("EMULATED_GPU_MOST_INSTRUCTIONS", "20000000")  # of a thread block
    if kernel in ("DecodeAttention", "PrefillAttention", "Combine"):
        gpu = gpu.on_hopper()
    assert isinstance(gpu, EmulatedGpu)
    rng = np.random.default_rng(zlib.crc32(kernel.encode()))
    calls = [ChangingCall(case) for case in CASES_THAT_CHANGE[kernel]]
    number, errors = 1000 if selection.everything else 36, []
    for i in range(number):
        try:
            calls[i % len(calls)].run_with_a_change(gpu, kernel, rng)
        except RuntimeError as error:
            errors.append(str(error))
    assert not errors, f"{len(errors)} of {number} calls: {errors[0]}"
    assert any(count > 0 for call in calls for count in call.counts.values())


@pytest.mark.skipif(ON_CUDA, reason="only the emulated GPU tells which kernel reads an array")
@pytest.mark.parametrize("kernels", ["portable", "by GPU"])
@pytest.mark.parametrize("q_len", [1, 100])
@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"cache_dtype": "int4", "scales": "per position"}, "TensorCoreAttention"),
        (NVFP4, "TensorCoreAttention"),
        (INT8_NVFP4, "TensorCoreAttention"),
        (MXFP4, "TensorCoreAttention"),
        (MXFP4 | {"dtype": "float16"}, "CudaCoreAttention"),
        (NVFP4 | {"groups": Groups(8, "float8_e4m3fn")}, "CudaCoreAttention"),
        ({"cache_dtype": "int8", "groups": Groups(32)}, "CudaCoreAttention"),
    ],
    ids=["int4", "nvfp4", "int8-nvfp4", "mxfp4", "mxfp4-float16", "groups-of-8", "groups"],
)
def test_the_kernel_that_reads_4_bits_or_groups(
    fields: dict[str, Any], kernel: str, q_len: int, kernels: str, gpu: Gpu
) -> None:
    """Neither the decode kernel nor those for long queries: on no GPU."""
    call = ChangingCall(
        Case(id="read", sequences=((q_len, 300),), **BFLOAT16 | fields, head_size=64)
    )
    gpu = EmulatedGpu(gpu.native, kernels)
    reads = {name: call.run(gpu, name, "block_tables", 0) for name in BATCHES}
    assert [name for name, count in reads.items() if count > 0] == [kernel]


def test_a_global_scale_may_be_one_of_a_group(gpu: Gpu) -> None:
    """Scales of groups are told from those of rows, which have no global one beside them."""
    groups = Groups(16, "float32", has_globals=True)
    fields = BFLOAT16 | {"cache_dtype": "e2m1", "groups": groups, "head_size": 64}
    case = Case(id="global", sequences=((1, 40), (5, 9)), unused_blocks=0, **fields)
    inputs, attributes = case.inputs(), case.attributes()
    for side in "kv":
        attributes[f"{side}_scale"] = np.nan_to_num(attributes[f"{side}_scale"], nan=0.5)
        attributes[f"{side}_global"] = attributes[f"{side}_scale"].reshape(-1)[:1].copy()
    call, arrays = checked_call("paged_attention", inputs, attributes)
    operands = dict(zip(call.names, map(gpu.copy, arrays), strict=True))
    for side in "kv":  # in the same memory
        operands[f"{side}_global"] = operands[f"{side}_scale"].reshape(-1)[:1]
    results = [gpu.copy(x) for x in results_of(call, arrays)]
    written = [*results, scratch_of(inputs, attributes)]
    gpu.run(paged_attention, [*operands.values()], written, 0, **numbers(call))
    assert_close_on_cuda(results[0], inputs, attributes)


def test_wrong_scratch_size_is_refused(gpu: Gpu) -> None:
    inputs, _ = batch("float32")
    with pytest.raises(ValueError, match=r"^paged_attention: result scratch must be uint8 \[\d+\]"):
        gpu.run(
            paged_attention,
            inputs,
            [np.array(inputs[0]), np.zeros(100, np.uint8)],
            0,
            scale=1.0,
            sliding_window=0,
            soft_cap=0.0,
        )


@given(
    num_tokens=st.integers(0, 300),
    max_seqs=st.integers(0, 300),
    num_kv_heads=st.sampled_from([1, 2, 8, 16]),
    group=st.sampled_from([1, 3, 4, 8, 71]),
    capacity=st.integers(0, 10**6),
    max_query_len=st.integers(0, 20),
)
def test_the_scratch_is_bounded(
    num_tokens: int,
    max_seqs: int,
    num_kv_heads: int,
    group: int,
    capacity: int,
    max_query_len: int,
) -> None:
    """The bound is the one that scratch.h and the documentation state."""
    num_heads = num_kv_heads * group
    query = ArraySpec((num_tokens, num_heads, 128), "float32")
    kv_cache = ArraySpec((5, 1, 2 * num_kv_heads, 128), "float32")
    sizes = [(max_seqs,), (max_seqs, capacity), (max_seqs + 1,), ()]
    metadata = [ArraySpec(shape, "int32") for shape in sizes]
    hint = {"max_query_len": max_query_len or None}
    call = paged_attention.check(query, kv_cache, *metadata, 1.0, None, None, **hint)
    num_bytes = paged_attention.cuda_scratch_bytes(call)
    tile_tokens, few_tokens = max(1, 64 // group), 16 // group
    if max_query_len > 0:
        tile_tokens, few_tokens = min(tile_tokens, max_query_len), min(few_tokens, max_query_len)
    max_splits, partials, per_head = partials_and_arrivals(
        num_tokens,
        max_seqs,
        capacity,
        num_kv_heads=num_kv_heads,
        tile_tokens=tile_tokens,
        few_tokens=few_tokens,
    )
    flags = num_tokens + partials + max_seqs * (num_kv_heads * per_head + 1)
    slots = 2 * 4 * 128 * (128 + 16) * min(384, num_tokens * num_heads * max_splits)
    num_bytes -= slots if capacity > 256 else 0
    assert num_bytes <= 4 * flags + 32 + 4 * partials * num_heads * 130


@settings(max_examples=1000)
@given(
    num_tokens=st.integers(0, 300),
    max_seqs=st.integers(0, 20),
    num_kv_heads=st.sampled_from([1, 2, 16]),
    group=st.sampled_from([1, 3, 71]),
    max_blocks=st.integers(0, 5000) | st.sampled_from([128, 129, 1280]),
    # At some windows, one position more or less changes the number of splits.
    sliding_window=st.none()
    | st.integers(1, 3000)
    | st.just(2**63 - 1)
    | st.sampled_from([128, 129, 171, 172, 191, 192]),
)
def test_handler_expects_the_scratch_size_of_the_check(
    gpu: Gpu,
    num_tokens: int,
    max_seqs: int,
    num_kv_heads: int,
    group: int,
    max_blocks: int,
    sliding_window: int | None,
) -> None:
    operands = [
        np.zeros((num_tokens, num_kv_heads * group, 8), np.float32),
        np.zeros((1, 2, 2 * num_kv_heads, 8), np.float32),
        *(np.zeros(n, np.int32) for n in (max_seqs, (max_seqs, max_blocks), max_seqs + 1, ())),
    ]
    attributes = {"scale": 1.0, "sliding_window": sliding_window}
    call, operands = checked_call("paged_attention", operands, attributes)
    _, scratch = call.results_on("cuda")
    results = [np.zeros_like(operands[0]), np.zeros(scratch.shape[0] + 1, np.uint8)]
    with pytest.raises(ValueError, match=rf"result scratch must be uint8 \[{scratch.shape[0]}\]; "):
        gpu.run(paged_attention, operands, results, 0, **numbers(call))
