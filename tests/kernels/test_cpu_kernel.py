"""The CPU handlers and kernels without a framework: every case against the oracle, and the promises
about bits, batches and threads. What they share with CUDA's is in tests/support/kernel_tests.py.
test_mutation.py runs this file on faulty kernels."""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from harness.compare import assert_close_on_cpu, assert_same_bits
from shared_ffi import _native, kv_cache_update, simple_add
from tests.cases.all import CASES
from tests.cases.case import Case
from tests.cases.random_calls import attention_cases
from tests.cases.updates import UpdateCase
from tests.support.calls import (
    call_handler,
    checked_call,
    cpu_instruction_set,
    eager_call,
    numbers,
    results_of,
    specs,
)
from tests.support.gpu import Cpu
from tests.support.kernel_tests import *  # noqa: F403
from tests.support.kernel_tests import one_sequence

F32, I32 = np.float32, np.int32


@pytest.fixture(params=_native.cpu_instruction_sets(), autouse=True, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[Cpu]:
    """Runs every test here with each instruction set that this processor has."""
    with cpu_instruction_set(request.param):
        yield Cpu()


@pytest.fixture(scope="module")
def each_kernel(kernels: Cpu) -> Cpu:
    return kernels


def attend(operands: Any, *, num_threads: int = 1, **attributes: Any) -> Any:
    """The result of paged_attention, or with return_lse a pair of results."""
    call, arrays = checked_call("paged_attention", operands, attributes)
    results = results_of(call, arrays)  # NaN, since a kernel must write all rows
    call_handler(call.target, numbers(call), arrays, results, num_threads)
    return tuple(results) if len(results) > 1 else results[0]


@pytest.mark.pairwise(each="case")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_paged_attention(case: Case) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(inputs, **attributes)
    assert_close_on_cpu(result, inputs, attributes)
    assert_same_bits(attend(inputs, **attributes, num_threads=3), result)


def test_kv_cache_update_of_two_tokens_with_one_slot() -> None:
    for num_threads in (1, 4):
        cache = np.zeros((1, 4, 64, 128), F32)
        key = np.arange(64, dtype=F32)[:, None, None] * np.ones((1, 32, 128), F32)
        slots = (np.arange(64) % 4).astype(I32)
        call_handler(kv_cache_update.TARGET, {}, [cache, key, key, slots], [cache], num_threads)
        assert (cache == np.array([60, 61, 62, 63], F32)[None, :, None, None]).all()


@pytest.mark.parametrize("position", [-1, 14, 2**31 - 1, -(2**63), 2**62])
def test_kv_cache_update_of_positions_without_a_row(position: int) -> None:
    case = UpdateCase("faulty", rotary_dim=8, num_heads=4, position_dtype="int64")
    inputs, attributes = case.inputs(), case.attributes()
    token = np.flatnonzero(inputs.slot_mapping >= 0)[2]
    attributes["positions"][token] = position
    call, arrays = checked_call("kv_cache_update", inputs, attributes)
    before = [x.copy() for x in arrays]
    updated = [arrays[operand] for operand, _ in call.aliases]
    with pytest.raises(
        ValueError, match=rf"positions\[{token}\] must be from 0 .*=13, .* {position}\."
    ):
        call_handler(call.target, numbers(call), arrays, updated, 3)
    for array, value in zip(arrays, before, strict=True):
        assert_same_bits(array, value)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_call_has_the_bits_of_two(dtype: str, interleaved: bool) -> None:
    """Rotate, then update."""
    fields: dict[str, Any] = {"dtype": dtype, "interleaved": interleaved, "num_tokens": 40}
    case = UpdateCase(
        "two calls", rotary_dim=16, num_heads=6, cache_dtype="int8", scales="one", **fields
    )
    inputs, attributes = case.inputs(), case.attributes()
    query, positions, table = (attributes.pop(x) for x in ("query", "positions", "cos_sin_cache"))
    attributes.pop("interleaved", None)
    rows = table[np.clip(positions, 0, len(table) - 1)]
    cos, sin = rows[:, None, :8], rows[:, None, 8:]

    def rotated(x: np.ndarray) -> np.ndarray:
        pairs = x[..., :16].reshape(*x.shape[:2], 8, 2) if interleaved else None
        halves = (x[..., :8], x[..., 8:16]) if pairs is None else (pairs[..., 0], pairs[..., 1])
        a, b = (half.astype(F32) for half in halves)
        turned = [a * cos - b * sin, b * cos + a * sin]
        first = (
            np.stack(turned, -1).reshape(*x.shape[:2], 16)
            if interleaved
            else np.concatenate(turned, -1)
        )
        return np.concatenate([first.astype(x.dtype), x[..., 16:]], -1)

    once = {
        "query": query,
        "positions": positions,
        "cos_sin_cache": table,
        "interleaved": interleaved,
    }
    call, arrays = checked_call("kv_cache_update", inputs, attributes | once)
    arrays = [x.copy() for x in arrays]
    updated = [arrays[operand] for operand, _ in call.aliases]
    call_handler(call.target, numbers(call), arrays, updated)
    twice = inputs._replace(key=rotated(inputs.key))
    call, (cache, *others) = checked_call("kv_cache_update", twice, attributes)
    cache = cache.copy()
    call_handler(call.target, numbers(call), [cache, *others], [cache])
    assert_same_bits(updated[0], cache)
    has_slot = inputs.slot_mapping >= 0
    assert_same_bits(updated[1][has_slot], rotated(query)[has_slot])


@pytest.mark.parametrize("head_size", [64, 65])
def test_kv_cache_update_larger_than_processor_caches(head_size: int) -> None:
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 4200, 8, head_size), dtype=np.float32)
    slots = rng.integers(-1, 4096, len(key))  # some are padding, some occur twice
    cache = np.zeros((256, 16, 16, head_size), np.float32)
    expected = np.zeros((4096, 16, head_size), np.float32)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot, 0::2], expected[slot, 1::2] = key[token], value[token]
    call_handler(kv_cache_update.TARGET, {}, [cache, key, value, slots], [cache], 4)
    assert_same_bits(cache.reshape(expected.shape), expected)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_simple_add_over_several_chunks(num_threads: int) -> None:
    a = np.arange(200_001, dtype=F32)
    result = np.full_like(a, np.nan)
    call_handler(simple_add.TARGET, {}, [a, a], [result], num_threads)
    assert_same_bits(result, a + a)


def flags_of_memory(address: int) -> list[str]:
    """What Linux keeps about the memory at an address: "hg" is the advice to use huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise ValueError(f"no memory at {address:#x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages in this kernel"
)
@pytest.mark.parametrize(("megabytes", "is_large"), [(8, True), (2, False)])
def test_a_large_output_gets_huge_pages(megabytes: int, is_large: bool) -> None:
    memory = mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    output = np.frombuffer(memory, F32).reshape(-1, 8, 64)
    cache, nothing = np.zeros((1, 1, 2, 64), F32), np.array(0, I32)
    operands = [
        np.zeros_like(output),
        cache,
        nothing[None],
        nothing[None, None],
        np.zeros(2, I32),
        nothing,
    ]
    call, arrays = checked_call("paged_attention", operands, {"scale": 1.0})
    call_handler(call.target, numbers(call), arrays, [output], 1)
    middle = output.ctypes.data + output.nbytes // 2
    assert ("hg" in flags_of_memory(middle)) == is_large


def test_an_eager_call_needs_an_address_for_each_array() -> None:
    a = np.ones(4, F32)
    handler = eager_call(simple_add.TARGET, {}, specs([a, a]), specs([a]))
    for operands, results in [([a], [a]), ([a, a, a], [a]), ([a, a], [])]:
        with pytest.raises(ValueError, match="an address is needed for each operand"):
            handler([x.ctypes.data for x in operands], [x.ctypes.data for x in results])


def test_metadata_that_changes_during_the_call() -> None:
    """The page table lies in the memory of the result. The row that sequence 0 writes, a subnormal
    number, is there the block id 2 of sequence 1, which was 1 when it was checked."""
    memory = np.zeros(24, F32)
    output, block_tables = memory[:16].reshape(2, 1, 8), memory[4:8].view(I32).reshape(2, 2)
    block_tables[:] = [[0, 0], [1, 1]]
    kv_cache = np.zeros((3, 4, 2, 8), F32)
    kv_cache[0, :, 1] = np.array(2, I32).view(F32)
    kv_cache[1, :, 1], kv_cache[2, :, 1] = 1, 2
    operands = [np.zeros((2, 1, 8), F32), kv_cache, np.array([1, 1], I32), block_tables]
    operands += [np.array([0, 1, 2], I32), np.array(2, I32)]
    call, _ = checked_call("paged_attention", operands, {"scale": 1.0})
    call_handler(call.target, numbers(call), operands, [output])
    assert (output[1] == 1).all()


@pytest.mark.parametrize(
    ("name", "column", "lengths", "tables", "options"),
    [
        ("tree_mask", 6, [1, 1], [[0], [1]], {}),
        ("bidirectional_ranges", 7, [1, 2], [[0, 9], [2**30, 1]], {"sliding_window": 1}),
    ],
)
def test_a_mask_that_changes_during_the_call(
    name: str, column: int, lengths: Any, tables: Any, options: dict[str, Any]
) -> None:
    """The mask lies in the memory of the result. The row that sequence 0 writes has a subnormal
    number, which is there a number 2 of sequence 1 that was 0 when it was checked: a tree mask that
    leaves no position, or the end of a range whose position 0 lies in a block that there is not."""
    memory = np.zeros(16, F32)
    output, mask = memory.reshape(2, 1, 8), memory[4:8].view(I32).reshape(2, 2)
    kv_cache = np.zeros((2, 1, 2, 8), F32)
    kv_cache[0, :, 1, column] = np.array(2, I32).view(F32)
    kv_cache[1, :, 1] = 1
    metadata = (np.array(x, I32) for x in (lengths, tables, [0, 1, 2], 2))
    operands = [np.zeros((2, 1, 8), F32), kv_cache, *metadata]
    attributes = {"scale": 1.0, name: mask} | options
    call, arrays = checked_call("paged_attention", operands, attributes)
    call_handler(call.target, numbers(call), arrays, [output])
    assert mask.flat[column - 4] == 2 and (output[1] == 1).all()


def test_kv_cache_update_of_slots_that_change_during_the_call() -> None:
    """The slots lie in the cache. The key of token 0 is there the slot 3 of token 1, which was 1
    when it was checked."""
    kv_cache = np.zeros((1, 4, 2, 8), F32)
    slots = kv_cache[0, 0, 0, :4].view(np.int64)
    slots[:] = [0, 1]
    key = np.zeros((2, 1, 8), F32)
    key[0, 0, 2:4] = np.array([3, 0], I32).view(F32)
    key[1] = 7
    call_handler(kv_cache_update.TARGET, {}, [kv_cache, key, key, slots], [kv_cache])
    assert (kv_cache[0, 1:] == np.array([7, 0, 0], F32)[:, None, None]).all()


HUGE = [2**62, 2**63 - 1]
LAYOUTS = [(0, 2, HUGE[0]), (0, HUGE[0], 4), (0, 2, HUGE[1]), (0, *HUGE), (HUGE[1], 2**31, 2**31)]


@pytest.mark.parametrize(("stride", "num_blocks", "block_size"), LAYOUTS)
@pytest.mark.parametrize("op", ["paged_attention", "kv_cache_update"])
def test_a_layout_that_overflows_is_refused(
    op: str, stride: int, num_blocks: int, block_size: int
) -> None:
    """Where strides are 0, such a cache needs little memory."""
    case = Case("huge", ((3, 9),)) if op == "paged_attention" else UpdateCase("huge")
    call, arrays = checked_call(op, case.inputs(), case.attributes())
    layout = dict.fromkeys(("block_stride", "position_stride", "head_stride"), stride)
    layout |= {"num_blocks": num_blocks, "block_size": block_size, "value_offset": 0}
    layout |= {"num_kv_heads": case.num_kv_heads}
    with pytest.raises(ValueError, match=f"kv_cache must hold num_blocks={num_blocks} blocks"):
        call_handler(call.target, numbers(call) | layout, arrays, results_of(call, arrays))


def attend_to_equal_positions(
    context: int, block_size: int, columns: int, sliding_window: int
) -> np.ndarray:
    """Whether each row of the result is the value of the positions, which are all the same."""
    metadata = [np.array(x, I32) for x in ([context], [[0] * columns], [0, 2], 1)]
    operands = [np.ones((2, 1, 2), F32), np.array([1, 2, 3, 4], F32), *metadata]
    layout = dict.fromkeys(("block_stride", "position_stride", "head_stride"), 0)
    layout |= {"num_blocks": 1, "block_size": block_size, "num_kv_heads": 1, "value_offset": 2}
    attributes = {"scale": 1.0, "sliding_window": sliding_window, "soft_cap": 0.0} | layout
    result = np.full((2, 1, 2), np.nan, F32)
    call_handler("xla_gpu_paged_attention", attributes, operands, [result])
    return result == np.array([3, 4], F32)


def test_a_table_with_room_for_more_than_2_63_positions() -> None:
    """Each length is legal then."""
    assert attend_to_equal_positions(7, 2**62, columns=4, sliding_window=0).all()


@pytest.mark.parametrize("context", [2**31 - 1024, 2**31 - 1023, 2**31 - 1])
def test_the_longest_context(context: int) -> None:
    """A GPU takes as many positions."""
    is_legal = context == 2**31 - 1024
    message = rf"context_lens\[0\] must be from 0 to {2**31 - 1024}; got {context}"
    with contextlib.nullcontext() if is_legal else pytest.raises(ValueError, match=message):
        assert attend_to_equal_positions(context, 2**31, columns=1, sliding_window=40).all()


SHARED_PREFIXES = [case for case in CASES if case.id.startswith("shared-prefix-")]


@pytest.mark.parametrize("case", SHARED_PREFIXES, ids=lambda case: case.id)
def test_a_shared_prefix_changes_no_bit(case: Case) -> None:
    """Each sequence has the bits that it has alone, where nothing is shared."""
    inputs, attributes = case.inputs(), case.attributes()
    trees = attributes.pop("tree_mask", None)
    starts, num_seqs = inputs.query_start_loc, len(case.sequences)
    together = {} if trees is None else {"tree_mask": trees}
    results = {n: attend(inputs, num_threads=n, **attributes, **together) for n in (1, 3)}
    for s in range(num_seqs):
        rows = slice(starts[s], starts[s + 1])
        own = {} if trees is None else {"tree_mask": trees[rows]}
        alone = attend(one_sequence(inputs, s), **attributes, **own)
        for result in results.values():
            assert_same_bits(tuple(x[rows] for x in result), alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"sliding_window": 300}, {"causal": False, "sinks": True}, {"nan_in_last_position": True}],
    ids=str,
)
def test_chunks_of_rows_share_packed_keys_and_values(fields: dict[str, Any], dtype: str) -> None:
    """One thread attends with 320 rows of each kv head at a time, which are two chunks. Three
    threads get shorter query tiles."""
    case = Case(
        id="shared",
        sequences=((40, 600), (37, 1100)),
        num_heads=128,
        num_kv_heads=16,
        head_size=8,
        dtype=dtype,
        **fields,
    )
    inputs, attributes = case.inputs(), case.attributes()
    result = attend(inputs, **attributes)
    assert_close_on_cpu(result, inputs, attributes)
    assert_same_bits(attend(inputs, **attributes, num_threads=3), result)


def test_a_cache_of_more_than_2_31_elements() -> None:
    """The cache has 4 GiB, but the system allocates only its touched pages."""
    num_blocks = 2**31 // (16 * 2 * 64) + 2
    kv_cache = np.zeros((num_blocks, 16, 2, 64), np.float16)
    assert kv_cache.size > 2**31
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 16, 1, 64)).astype(np.float16)
    slots = ((num_blocks - 1) * 16 + np.arange(16)).astype(np.int64)
    call_handler(kv_cache_update.TARGET, {}, [kv_cache, key, value, slots], [kv_cache], 2)
    assert_same_bits(kv_cache[-1, :, 1], value[:, 0])
    metadata = [
        np.array([16], I32),
        np.array([[num_blocks - 1]], I32),
        np.array([0, 1], I32),
        np.array(1, I32),
    ]
    query = rng.standard_normal((1, 2, 64)).astype(np.float16)
    in_small = [query, kv_cache[-1:].copy(), metadata[0], np.array([[0]], I32), *metadata[2:]]
    assert_same_bits(attend([query, kv_cache, *metadata], scale=0.1), attend(in_small, scale=0.1))


@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("attributes", [{}, {"sliding_window": 700}, {"soft_cap": 20.0}], ids=str)
def test_prefill_chunks_and_decode_have_the_same_bits(
    attributes: dict[str, Any], dtype: Any
) -> None:
    """The bits depend neither on the rows that share a tile or split nor on the number of
    threads."""
    rng = np.random.default_rng(3)
    context, block_size = 1200, 16
    query = rng.standard_normal((context, 6, 40)).astype(dtype)
    kv_cache = rng.standard_normal((75, block_size, 4, 40)).astype(dtype)
    table = rng.permutation(75).astype(I32)[None]

    def tokens(first: int, last: int, num_threads: int) -> np.ndarray:
        operands = [query[first:last], kv_cache, np.array([last], I32), table]
        operands += [np.array([0, last - first], I32), np.array(1, I32)]
        return attend(operands, scale=0.3, num_threads=num_threads, **attributes)

    whole = tokens(0, context, 1)
    assert_same_bits(tokens(0, context, 5), whole)
    for first, last in [(0, 1), (510, 514), (640, 768), (700, 1199), (1198, 1200), (1199, 1200)]:
        for num_threads in (1, 4):
            assert_same_bits(tokens(first, last, num_threads), whole[first:last])


def test_zero_queries_at_the_largest_scale() -> None:
    """Logits of zero, not NaN: all positions have the same weight."""
    case = Case(id="zero", sequences=((5, 20),), query_factor=0.0)
    inputs, attributes = case.inputs(), case.attributes() | {"scale": 2.0**126}
    assert_close_on_cpu(attend(inputs, **attributes), inputs, attributes)


def test_exponential() -> None:
    """Two keys have the logits x and 0, and only the first has a value: the output is e^x / (1 +
    e^x). The exponential, the sum and the quotient err by at most 4 units in the last place (2 +
    1/2 + 1/2). The kernel also rounds the logit x log2(e) to float32; e^x multiplies this relative
    error by |x|."""
    logits = np.concatenate([np.linspace(-87.3, 0, 40_001), -np.logspace(-8, 1, 5_000)]).astype(F32)
    count = len(logits)
    kv_cache = np.zeros((1, 2, 2, 2), F32)
    kv_cache[0, 0, 0] = [1, 0]  # K of position 0
    kv_cache[0, 0, 1] = 1  # V of position 0
    query = np.zeros((count, 1, 2), F32)
    query[:, 0, 0] = logits
    operands = [
        query,
        kv_cache,
        np.full(count, 2, I32),
        np.zeros((count, 1), I32),
        np.arange(count + 1, dtype=I32),
        np.array(count, I32),
    ]
    result = attend(operands, scale=1.0)[:, 0, 0].astype(np.float64)
    exact = 1 / (1 + np.exp(-logits.astype(np.float64)))
    allowed = 4 * np.spacing(exact.astype(F32)) + exact * np.abs(logits) * 2.25 * 2.0**-24
    assert (np.abs(result - exact) <= allowed).all()


@given(attention_cases())
def test_random(case: Case) -> None:
    test_paged_attention(case)
