"""How evenly the CUDA kernels deal work to the thread blocks of an H200, by models of `DecodeSchedule`
and `ItemCounter`. `-s` prints the worst share of each mix of lengths."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu.schedules import (
    QUERY_ROWS,
    counted,
    dealt,
    item_tiles,
    splits_of,
    written_rows,
)
from benchmarks.gpu.slots import DECODE_TILE, MULTIPROCESSORS
from examples.replay import trace

THREAD_BLOCKS = 2 * MULTIPROCESSORS
HEADS, PREFILL_KV_TILE = 32, 128


def decode_mixes() -> dict[str, np.ndarray]:
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
def test_decode_splits_are_balanced(mix: str, batch: int, num_kv_heads: int) -> None:
    """No thread block has more than its share and one split."""
    lengths = decode_mixes()[mix]
    worst = 0.0
    for first in range(0, len(lengths) - batch + 1, max(batch, 64)):
        head_splits = splits_of(lengths[first : first + batch], HEADS, num_kv_heads)
        tiles = np.concatenate([*head_splits])
        shares = dealt(tiles, THREAD_BLOCKS)
        assert shares.sum() == tiles.sum()
        assert shares.max() <= tiles.sum() / THREAD_BLOCKS + tiles.max()
        worst = max(worst, shares.max() / (tiles.sum() / THREAD_BLOCKS))
    print(f"{mix}, {batch} sequences, {num_kv_heads} kv heads: worst {worst:.2f} of the mean")


@pytest.mark.parametrize(("batch", "most"), [(8, 0.04), (32, 0.02), (64, 0.01), (128, 0.005)])
def test_decode_writes_few_partial_results(batch: int, most: float) -> None:
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


def prompt_lengths(mix: str) -> np.ndarray:
    count, _, length = mix.partition(" x ")
    if length.isdigit():
        return np.full(int(count), int(length))
    lengths = [x.prompt_tokens for x in trace.generate(4096) if x.prompt_tokens > QUERY_ROWS]
    return np.array(lengths[: int(count)])


@pytest.mark.parametrize("num_kv_heads", [8, 32])
@pytest.mark.parametrize(
    "mix",
    ["1 x 2048", "1 x 8192", "1 x 16384", "2 x 4096", "4 x 2048", "16 x chat", "64 x chat"],
)
def test_prefill_tiles_are_balanced(mix: str, num_kv_heads: int) -> None:
    heads = HEADS, num_kv_heads
    prompt_tiles = [item_tiles((x, x), heads, PREFILL_KV_TILE) for x in prompt_lengths(mix)]
    tiles = np.concatenate(prompt_tiles)
    dealt = counted(tiles, MULTIPROCESSORS)
    assert sum(dealt) == tiles.sum()
    worst = max(dealt) / (tiles.sum() / MULTIPROCESSORS)
    rounds = np.pad(tiles, (0, -len(tiles) % MULTIPROCESSORS)).reshape(-1, MULTIPROCESSORS)
    in_rounds = rounds.sum(axis=0).max() / (tiles.sum() / MULTIPROCESSORS)
    print(
        f"{mix}, {num_kv_heads} kv heads: worst {worst:.3f} of the mean, {in_rounds:.3f} in rounds"
    )
    assert worst <= 1.035
