"""How evenly the decode kernel deals the splits of a batch to the thread blocks of an H200, by a model
of `DecodeSchedule`. `-s` prints the worst share of each mix of lengths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from examples.replay import trace
from shared_ffi import _native

THREAD_BLOCKS = 2 * 132
TILE, ALIGNMENT = 16, 128  # positions: of DecodeSchedule, and what splits begin at a multiple of
HEADS = 32


def splits(contexts: np.ndarray, num_kv_heads: int) -> Iterator[int]:
    """The tiles of each split, in the order in which they are dealt."""
    sizes = _native.scratch_sizes(
        num_heads=HEADS,
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
            yield from (-(-x // TILE) for x in of_head)


def shares(tiles: np.ndarray) -> np.ndarray:
    """The tiles of each thread block. A split is dealt to the block in whose equal part of all tiles
    it begins."""
    begins = np.cumsum(tiles) - tiles
    limits = tiles.sum() * np.arange(1, THREAD_BLOCKS + 1) // THREAD_BLOCKS
    return np.bincount(
        np.searchsorted(limits, begins, side="right"), tiles, minlength=THREAD_BLOCKS
    )


def mixes() -> dict[str, np.ndarray]:
    """Contexts of decoding sequences: those of a chat trace, long ones with a shared prefix, and
    equal ones."""
    arrivals = list(trace.generate(1024))
    chat = np.array([x.prompt_tokens + x.generated_tokens // 2 for x in arrivals])
    rng = np.random.default_rng(0)
    long = rng.choice([8192, 16384, 32768], 1024) + rng.geometric(1 / 2000, 1024)
    return {"chat": chat, "long": long, "equal": np.full(1024, 8192)}


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("batch", [1, 8, 64, 128])
@pytest.mark.parametrize("mix", ["chat", "long", "equal"])
def test_no_thread_block_has_more_than_its_part_and_a_split(
    mix: str, batch: int, num_kv_heads: int
) -> None:
    lengths = mixes()[mix]
    worst = 0.0
    for first in range(0, len(lengths) - batch + 1, max(batch, 64)):
        tiles = np.fromiter(splits(lengths[first : first + batch], num_kv_heads), int)
        dealt = shares(tiles)
        assert dealt.sum() == tiles.sum()
        assert dealt.max() <= tiles.sum() / THREAD_BLOCKS + tiles.max()
        worst = max(worst, dealt.max() / (tiles.sum() / THREAD_BLOCKS))
    print(f"{mix}, {batch} sequences, {num_kv_heads} kv heads: worst {worst:.2f} of the mean")


@pytest.mark.parametrize(("batch", "most"), [(8, 0.04), (32, 0.02), (64, 0.01), (128, 0.005)])
def test_few_partial_results_are_written(batch: int, most: float) -> None:
    """As a share of K and V in bfloat16, written and read, with 8 kv heads and contexts of 8192."""
    of_head = 32  # splits of a sequence and kv head
    tiles = np.fromiter(splits(np.full(batch, 8192), 8), int)
    assert len(tiles) == batch * 8 * of_head and (tiles == tiles[0]).all()
    limits = tiles.sum() * np.arange(1, THREAD_BLOCKS + 1) // THREAD_BLOCKS
    block = np.searchsorted(limits, np.cumsum(tiles) - tiles, side="right")
    block = block.reshape(-1, of_head)
    is_folded = block == block[:, :1]  # by the block that has the first split
    written = (~is_folded).sum() + (~is_folded.all(axis=1)).sum()  # with the fold itself
    rows, columns = HEADS // 8, 128
    partial_bytes = rows * (4 * columns + 8)
    share = 2 * written * partial_bytes / (tiles.sum() * TILE * 2 * columns * 2)
    print(f"{batch} sequences: {written} of {len(tiles)} splits, {share:.2%} of the traffic")
    assert share <= most
