"""Models of how the kernels deal work to the thread blocks of an H200: `DecodeSchedule` and
`ItemCounter` (shared_ffi/csrc/paged_attention/cuda)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.gpu.slots import DECODE_TILE, HOPPER_CONSUMERS, HOPPER_ROWS
from shared_ffi import _native

ALIGNMENT = 128  # positions: kTileAlignment
QUERY_ROWS = HOPPER_CONSUMERS * HOPPER_ROWS  # of a work item of the Hopper kernel


def splits_of(contexts: Iterable[int], num_heads: int, num_kv_heads: int) -> Iterator[list[int]]:
    """The tiles of each split of a sequence and kv head, in the order in which they are dealt."""
    sizes = _native.scratch_sizes(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        value_head_size=128,
        sliding_window=0,
        max_query_len=1,
    )
    for context in contexts:
        positions = -(-context // sizes.split_limit)
        positions = max(sizes.min_split, -(-positions // ALIGNMENT) * ALIGNMENT)
        of_head = [min(positions, context - x) for x in range(0, context, positions)]
        for _ in range(num_kv_heads):
            yield [-(-x // DECODE_TILE) for x in of_head]


def blocks_of(tiles: np.ndarray, thread_blocks: int) -> np.ndarray:
    """The thread block of each split: that in whose equal part of all tiles it begins."""
    begins = np.cumsum(tiles) - tiles
    limits = tiles.sum() * np.arange(1, thread_blocks + 1) // thread_blocks
    return np.searchsorted(limits, begins, side="right")


def dealt(tiles: np.ndarray, thread_blocks: int) -> np.ndarray:
    """The tiles of each thread block of the decode kernel."""
    return np.bincount(blocks_of(tiles, thread_blocks), tiles, minlength=thread_blocks)


def written_rows(splits: list[list[int]], thread_blocks: int) -> int:
    """The partial results of each query row of a kv head that are written to memory. A thread block
    folds the first splits of a sequence and kv head, as far as they are its own."""
    block = blocks_of(np.concatenate(splits), thread_blocks)
    written, first = 0, 0
    for of_head in splits:
        others = block[first : first + len(of_head)] != block[first]
        written += int(others.sum()) + int(others.any())  # with the fold itself
        first += len(of_head)
    return written


def item_tiles(sequence: tuple[int, int], heads: tuple[int, int], kv_tile: int) -> np.ndarray:
    """The KV tiles of each work item of causal attention, in the order of their numbers.
    `sequence`: query tokens and context. `heads`: query heads and kv heads."""
    q_len, context = sequence
    tokens = QUERY_ROWS * heads[1] // heads[0]
    ends = np.minimum(np.arange(tokens, q_len + tokens, tokens), q_len)[::-1] + context - q_len
    return np.repeat(-(-ends // kv_tile), heads[1])


def counted(tiles: np.ndarray, thread_blocks: int) -> list[int]:
    """The KV tiles of each thread block of the Hopper kernel. A block that is done takes the next
    item."""
    taken = [0] * thread_blocks
    for of_item in tiles:
        heapq.heapreplace(taken, taken[0] + int(of_item))
    return taken
