"""Bugs that other implementations of paged attention had, as cases for every backend. The comment
at each is where it was reported. Offsets beyond 32 bits (vllm #1486, #50427) are in
tests/kernels/test_cpu_kernel.py, test_a_cache_of_more_than_2_31_elements. What others read past an
array (flash-attention #2709, onnxruntime #32391) is among the calls of tests/cases/bad_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness import reference
from tests.support import backends

F32, I32 = np.float32, np.int32
BLOCK_SIZE = 4

Call = tuple[list[np.ndarray], dict[str, Any]]


def decode(
    lengths: list[int],
    tables: list[list[int]],
    *,
    num_blocks: int = 8,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    padding: int = 0,
    **attributes: Any,
) -> Call:
    """One query token for each sequence, then padding."""
    rng = np.random.default_rng(0)
    count = len(lengths)
    operands = [
        rng.standard_normal((count + padding, num_heads, 8), F32),
        rng.standard_normal((num_blocks, BLOCK_SIZE, 2 * num_kv_heads, 8), F32),
        np.array(lengths, I32),
        np.array(tables, I32),
        np.arange(count + 1, dtype=I32),
        np.array([count], I32),
    ]
    return operands, {"scale": 0.5} | attributes


def unwritten_values_of_the_last_block() -> Call:
    # vllm #641, GHSA-x368-4g9h-fvv4: a weight of zero times NaN.
    operands, attributes = decode([6, 1], [[3, 5], [7, 0]])
    for block, first in ((5, 2), (7, 1)):
        operands[1][block, first:] = np.nan
    for block in (0, 1, 2, 4, 6):
        operands[1][block] = np.inf
    return operands, attributes


def block_ids_beyond_16_bits() -> Call:
    # aiter #3062, #3211: the upper bits of a block id were dropped.
    return decode([16], [[1000, 65535, 65536, 67001]], num_blocks=67002)


def stale_entries_after_the_context() -> Call:
    # vllm #42494: the tail of the block table was read.
    return decode([5, 4], [[3, 5, -1, 2**31 - 1], [7, -1, -1, -1]])


def stale_entries_before_the_window() -> Call:
    # vllm #42273: blocks that a sliding window had left were given back.
    return decode([16, 13], [[-1, -1, 2, 6], [-1, 2**31 - 1, 1, 4]], sliding_window=5)


def padding_queries_of_nan() -> Call:
    # sglang #15757, #18685: NaN of padding reached real rows.
    operands, attributes = decode([6, 1], [[3, 5], [7, 0]], padding=3)
    operands[0][2:] = np.nan
    return operands, attributes


def groups(size: int) -> Callable[[], Call]:
    # flashinfer #2849: 16 query heads and more for each kv head.
    return lambda: decode([6, 9], [[3, 5, 0], [7, 0, 1]], num_heads=2 * size)


CASES: dict[str, Callable[[], Call]] = {
    "unwritten-values-of-the-last-block": unwritten_values_of_the_last_block,
    "block-ids-beyond-16-bits": block_ids_beyond_16_bits,
    "stale-entries-after-the-context": stale_entries_after_the_context,
    "stale-entries-before-the-window": stale_entries_before_the_window,
    "padding-queries-of-nan": padding_queries_of_nan,
    **{f"groups-of-{size}": groups(size) for size in (16, 17, 32, 64)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_matches_oracle(backend: str, name: str) -> None:
    operands, attributes = CASES[name]()
    result = backends.BACKENDS[backend]("paged_attention", *operands, **attributes)
    expected = reference.paged_attention(*operands, **attributes)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
