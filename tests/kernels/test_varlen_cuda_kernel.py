"""varlen_attention and its derivative on CUDA: every case against the oracle, with any number of
thread blocks, in any batch, with faulty lengths. They run as those of test_cuda_kernel.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.compare import assert_same_bits
from harness.reference import PAGED_LAYOUT, as_paged
from tests.cases.varlen import CASES, VarlenCase, oracle
from tests.support import selection
from tests.support.gpu import ON_CUDA, Gpu
from tests.support.gpu import attend as attend_paged
from tests.support.varlen_calls import (
    ARRAYS,
    F32,
    FEATURES,
    assert_answers_share_their_prompt,
    assert_close,
    attend,
    differentiate,
)

OF_16_BITS = [
    replace(case, id=f"{case.id}-of-16-bits", dtype="bfloat16")
    for case in CASES
    if case.dtype == "float32" and "float32" not in case.id
]
"""Features that have a case in float32 alone: tensor cores have kernels of their own."""


@pytest.mark.pairwise
@pytest.mark.parametrize("case", [*CASES, *OF_16_BITS], ids=lambda case: case.id)
def test_varlen_attention_backward(case: VarlenCase, gpu: Gpu) -> None:
    """The gradients are those of float64, and have the same bits with any number of thread blocks:
    1, 3, 7 and all."""
    arguments, dout = case(), case.weights()
    dout[case.num_tokens :] = np.nan
    forward = attend(gpu, arguments)
    gradients = differentiate(gpu, arguments, dout, forward)
    assert_close(gradients, case.dtype, oracle(arguments, dout)[1])
    for name in ARRAYS[:3]:
        assert not gradients[name][case.num_tokens :].any()
    is_slow = case.dtype == "float32" and not selection.everything
    for seed in (3,) if is_slow else (1, 2, 3):
        for name, gradient in differentiate(gpu, arguments, dout, forward, seed).items():
            assert_same_bits(gradient, gradients[name])


HOPPER = [case for case in [*CASES, *OF_16_BITS] if case.dtype != "float32"]
HOPPER = [case for case in HOPPER if case.head_size <= 128]


@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.id)
def test_varlen_attention_backward_on_hopper(case: VarlenCase, gpu: Gpu) -> None:
    """The gradients have the bits of the portable kernels, with any number of thread blocks."""
    hopper = gpu.on_hopper()
    arguments, dout = case(), case.weights()
    dout[case.num_tokens :] = np.nan
    forward = attend(gpu, arguments)
    gradients = differentiate(gpu, arguments, dout, forward)
    for seed in (0, 1, 2, 3) if selection.everything else (1, 3):
        for name, gradient in differentiate(hopper, arguments, dout, forward, seed).items():
            assert_same_bits(gradient, gradients[name])


ALL_FEATURES: Any = {
    "arrays": ("sinks", "alibi_slopes", "bidirectional_ranges", "causal"),
    "options": {"soft_cap": 3.0, "sliding_window": 60, "window_right": 20},
}
SMALL = VarlenCase("small", lengths=(5, 0, 130, 1, 33), num_heads=6, dtype="bfloat16", padding=2)
MANY_ROWS = replace(SMALL, lengths=(3, 40, 150), num_heads=40, num_kv_heads=2)
SMALL_CASES = {
    "plain": SMALL,
    "many-rows": MANY_ROWS,
    "all": replace(SMALL, head_size=48, value_head_size=40, **ALL_FEATURES),
    "float16": replace(SMALL, dtype="float16", head_size=128),
    "float32": replace(SMALL, dtype="float32", lengths=(5, 0, 40, 1), **ALL_FEATURES),
    "unaligned": replace(SMALL, lengths=(5, 0, 40, 1), head_size=20, value_head_size=12),
    "wide": replace(SMALL, lengths=(70, 3), num_heads=2, num_kv_heads=1, head_size=256),
}


@pytest.fixture(params=SMALL_CASES)
def small(request: pytest.FixtureRequest) -> VarlenCase:
    return SMALL_CASES[request.param]


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_varlen_attention_backward_of_a_sequence_alone(
    small: VarlenCase, kernels: str, gpu: Gpu
) -> None:
    """A sequence's gradients have the same bits in a batch and alone, also beside NaN."""
    gpu = gpu.on_hopper() if kernels == "hopper" else gpu
    arguments, dout = small(), small.weights()
    dout[small.num_tokens :] = np.nan
    starts = arguments["query_start_loc"]
    for s, length in enumerate(small.lengths):
        own = slice(starts[s], starts[s] + length)
        beside = {name: np.full_like(arguments[name], np.nan) for name in ARRAYS[:3]}
        for name, array in beside.items():
            array[own] = arguments[name][own]
        dout_beside = np.full_like(dout, np.nan)
        dout_beside[own] = dout[own]
        alone = arguments | {name: arguments[name][own] for name in ARRAYS[:3]}
        alone |= {"query_start_loc": np.array([0, length], np.int32)}
        for name, rows in (("causal", slice(s, s + 1)), ("bidirectional_ranges", own)):
            if isinstance(alone.get(name), np.ndarray):
                alone[name] = alone[name][rows]
        alone["num_seqs"] = np.array([1], np.int32)
        of_alone = differentiate(gpu, alone, dout[own], attend(gpu, alone), 3)
        batch = arguments | beside
        of_batch = differentiate(gpu, batch, dout_beside, attend(gpu, batch), 1)
        for name in ARRAYS[:3]:
            assert_same_bits(of_batch[name][own], of_alone[name])


@pytest.mark.skipif(ON_CUDA, reason="only the emulated GPU tells what was launched")
@pytest.mark.parametrize(
    ("kernels", "head_size", "threads"),
    [("portable", 128, [256, 128]), ("hopper", 128, [384, 384]), ("hopper", 256, [256, 128])],
)
def test_which_kernels_compute_gradients(
    kernels: str,
    head_size: int,
    threads: list[int],
    gpu: Gpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hopper's kernels take heads of up to 128, unless the process chooses the portable ones."""
    gpu = gpu.on_hopper() if kernels == "hopper" else gpu
    case = replace(SMALL, lengths=(5,), head_size=head_size)
    arguments = case()
    forward = attend(gpu, arguments)
    log = tmp_path / "launches"
    monkeypatch.setenv("EMULATED_GPU_LAUNCHES", str(log))
    differentiate(gpu, arguments, case.weights(), forward)
    assert [int(line.split()[1]) for line in log.read_text().splitlines()][2:] == threads


PREFIXES = replace(SMALL, head_size=48, value_head_size=40, **ALL_FEATURES)
PREFIXES = replace(PREFIXES, arrays=(*PREFIXES.arrays, "prefix_seqs"), prefix_seqs=(-1, 0, 0, 2, 2))


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
@pytest.mark.parametrize("name", [*SMALL_CASES, "prefixes"])
def test_varlen_attention_has_the_bits_of_paged_attention(
    name: str, kernels: str, gpu: Gpu
) -> None:
    """On a cache with blocks of one token, with 1 thread block and with all."""
    gpu = gpu.on_hopper() if kernels == "hopper" else gpu
    arguments = (SMALL_CASES | {"prefixes": PREFIXES})[name]()
    options = {name: x for name, x in arguments.items() if name in FEATURES or np.isscalar(x)}
    inputs, value = as_paged(*[arguments[x] for x in ARRAYS], options.pop("prefix_seqs", None))
    inputs = [x.astype(np.int32) if x.dtype.kind == "i" else x for x in inputs]
    options |= {"value_cache": value, "kv_layout": PAGED_LAYOUT, "return_lse": True}
    expected = attend_paged(gpu, inputs, **options)
    for seed in (0, 1):
        assert_same_bits(attend(gpu, arguments, seed), expected)


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_varlen_attention_of_answers_that_share_their_prompt(
    dtype: str, kernels: str, gpu: Gpu
) -> None:
    assert_answers_share_their_prompt(gpu.on_hopper() if kernels == "hopper" else gpu, dtype)


@pytest.mark.parametrize("faulty", [1, 9, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_varlen_attention_of_faulty_prefixes(faulty: int, dtype: str, gpu: Gpu) -> None:
    """Sequences that name no earlier one, and those that continue them, are NaN. What others have
    are the bits that they have without."""
    fields: dict[str, Any] = {"arrays": ("prefix_seqs",), "prefix_seqs": (-1, -1, -1, 0)}
    case = replace(SMALL, lengths=(5, 30, 102, 7), padding=1, dtype=dtype, **fields)
    arguments, dout = case(), case.weights()
    right = attend(gpu, arguments)
    expected = differentiate(gpu, arguments, dout, right)
    wrong = arguments | {"prefix_seqs": np.array([-1, faulty, 1, 0, faulty], np.int32)}
    found = {"output": (attend(gpu, wrong, 1)[0], right[0])}
    gradients = differentiate(gpu, wrong, dout, right, 1)
    found |= {name: (gradients[name], expected[name]) for name in ARRAYS[:3]}
    for array, of_right in found.values():
        assert np.isnan(array[5:137].astype(F32)).all()
        for own in (slice(0, 5), slice(137, None)):
            assert_same_bits(array[own], of_right[own])


LENGTHS: dict[str, tuple[dict[int, int], dict[str, Any]]] = {
    "decreases": ({2: 3}, {}),
    "negative": ({0: -3}, {}),
    "beyond the tokens": ({3: 10**6}, {}),
    "largest": ({2: 2**31 - 1, 3: -(2**31)}, {}),
    "num_seqs": ({}, {"num_seqs": np.array([9], np.int32)}),
    "negative num_seqs": ({}, {"num_seqs": np.array([-1], np.int32)}),
    "longer than promised": ({}, {"max_query_len": 100}),
}


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
@pytest.mark.parametrize("faulty", LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_varlen_attention_backward_of_faulty_lengths(
    faulty: str, dtype: str, kernels: str, gpu: Gpu
) -> None:
    """Nothing outside of the arrays is touched. The gradients of faulty sequences, and of all tokens
    behind starts that are no valid range, are NaN; those of other sequences are as without them."""
    gpu = gpu.on_hopper() if kernels == "hopper" else gpu
    case = replace(SMALL, lengths=(5, 30, 102, 7), padding=1, dtype=dtype, arrays=("sinks",))
    arguments, dout = case(), case.weights()
    places, others = LENGTHS[faulty]
    forward = attend(gpu, arguments)
    right = differentiate(gpu, arguments, dout, forward)
    starts = arguments["query_start_loc"].copy()
    starts[[*places]] = [*places.values()]
    wrong = arguments | {"query_start_loc": starts} | others
    gradients = differentiate(gpu, wrong, dout, forward, 1)
    count = int(wrong["num_seqs"].item())
    known = starts if 0 <= count <= len(case.lengths) else starts[:0]
    is_right, is_zero = np.zeros(len(dout), bool), np.zeros(len(dout), bool)
    ends = [0]
    for start, end in pairwise(known[: count + 1].tolist()):
        if not 0 <= start <= end <= len(dout):
            break
        ends.append(end)
        is_right[start:end] = end - start <= wrong.get("max_query_len", end)
    if len(ends) - 1 == count:  # nothing is lost behind the last
        is_zero[ends[-1] :] = True
    for name in ARRAYS[:3]:
        found = gradients[name].astype(F32)
        assert_same_bits(gradients[name][is_right], right[name][is_right])
        assert not found[is_zero].any()
        assert np.isnan(found[~is_right & ~is_zero]).all()
    assert np.isnan(gradients["sinks"]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_varlen_attention_backward_of_large_logits(dtype: str, gpu: Gpu) -> None:
    """A weight is at most 1, however wrong a sum of large logits is."""
    case = replace(SMALL, lengths=(70,), dtype=dtype, padding=0)
    arguments, dout = case(), case.weights()
    arguments["scale"] = 1e7
    gradients = differentiate(gpu, arguments, dout, attend(gpu, arguments))
    assert all(np.isfinite(x.astype(F32)).all() for x in gradients.values())
    of_group = np.abs(dout.astype(F32)).reshape(70, case.num_kv_heads, -1, case.head_size)
    assert (np.abs(gradients["value"].astype(F32)) <= 1.01 * of_group.sum((0, 2))).all()


@pytest.mark.parametrize("options", [{}, {"alibi_slopes"}], ids=["plain", "general"])
@pytest.mark.parametrize("factor", [1e4, 1e8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_varlen_attention_backward_of_an_only_weight(
    dtype: str, factor: float, options: set[str], gpu: Gpu
) -> None:
    """A sequence's only token has the weight 1, however large its logit and whatever its sign: the
    gradient of its value is that of its output."""
    case = VarlenCase("only", (1,) * 40, num_kv_heads=4, dtype=dtype, padding=0)
    case = replace(case, arrays=(*options,))
    arguments, dout = case(), case.weights()
    arguments["query"] = (arguments["query"].astype(F32) * F32(factor)).astype(dout.dtype)
    found = differentiate(gpu, arguments, dout, attend(gpu, arguments))
    assert_same_bits(found["value"], dout)


WIDER = {
    "all": dict.fromkeys((*ARRAYS[:3], "output", "dout"), 16),
    "value": {"value": 16},
    "key-and-value": {"key": 8, "value": 24},
    "unaligned": dict.fromkeys((*ARRAYS[:3], "output", "dout"), 5),
}


@pytest.mark.parametrize("sizes", [(32, 32), (48, 40), (20, 12)], ids=str)
@pytest.mark.parametrize("rows", WIDER)
def test_varlen_attention_of_rows_in_wider_rows(
    rows: str, sizes: tuple[int, int], gpu: Gpu
) -> None:
    """Rows that are parts of wider ones. Kernels for rows that are not aligned round otherwise."""
    case = replace(SMALL, lengths=(5, 40), head_size=sizes[0], value_head_size=sizes[1])
    arguments, dout = case(), case.weights()
    forward = attend(gpu, arguments)
    output = attend(gpu, arguments, 0, WIDER[rows])[0]
    gradients = differentiate(gpu, arguments, dout, forward, 1, WIDER[rows])
    if rows == "unaligned":
        expected = oracle(arguments, dout)
        assert np.abs(output[:45].astype(F32) - expected[0][:45]).max() <= 2**-7
        assert_close(gradients, case.dtype, expected[1])
        return
    assert_same_bits(output, forward[0])
    for name, gradient in differentiate(gpu, arguments, dout, forward).items():
        assert_same_bits(gradients[name], gradient)
