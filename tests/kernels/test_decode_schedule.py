"""How evenly the decode kernel deals the splits of a batch to the thread blocks of an H200, by a model
of `DecodeSchedule`. `-s` prints the worst share of each mix of lengths."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu.schedules import dealt, splits_of, written_rows
from benchmarks.gpu.slots import DECODE_TILE, MULTIPROCESSORS
from examples.replay import trace

THREAD_BLOCKS = 2 * MULTIPROCESSORS
HEADS = 32


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
        of_heads = splits_of(lengths[first : first + batch], HEADS, num_kv_heads)
        tiles = np.concatenate([*of_heads])
        shares = dealt(tiles, THREAD_BLOCKS)
        assert shares.sum() == tiles.sum()
        assert shares.max() <= tiles.sum() / THREAD_BLOCKS + tiles.max()
        worst = max(worst, shares.max() / (tiles.sum() / THREAD_BLOCKS))
    print(f"{mix}, {batch} sequences, {num_kv_heads} kv heads: worst {worst:.2f} of the mean")


@pytest.mark.parametrize(("batch", "most"), [(8, 0.04), (32, 0.02), (64, 0.01), (128, 0.005)])
def test_few_partial_results_are_written(batch: int, most: float) -> None:
    """As a share of K and V in bfloat16, written and read, with 8 kv heads and contexts of 8192."""
    splits = [*splits_of(np.full(batch, 8192), HEADS, 8)]
    tiles = np.concatenate(splits)
    assert len(tiles) == batch * 8 * 32 and (tiles == tiles[0]).all()
    written = written_rows(splits, THREAD_BLOCKS)
    rows, columns = HEADS // 8, 128
    partial_bytes = rows * (4 * columns + 8)
    share = 2 * written * partial_bytes / (tiles.sum() * DECODE_TILE * 2 * columns * 2)
    print(f"{batch} sequences: {written} of {len(tiles)} splits, {share:.2%} of the traffic")
    assert share <= most
