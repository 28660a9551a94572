"""How evenly query tiles are dealt to the thread blocks of an H200, by a model of `ItemCounter`. `-s`
prints the worst share of each mix of lengths."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu.schedules import QUERY_ROWS, counted, item_tiles
from benchmarks.gpu.slots import MULTIPROCESSORS
from examples.replay import trace

HEADS, KV_TILE = 32, 128


def prompts_of(mix: str) -> np.ndarray:
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
def test_thread_blocks_end_together(mix: str, num_kv_heads: int) -> None:
    heads = HEADS, num_kv_heads
    of_prompts = [item_tiles((x, x), heads, KV_TILE) for x in prompts_of(mix)]
    tiles = np.concatenate(of_prompts)
    dealt = counted(tiles, MULTIPROCESSORS)
    assert sum(dealt) == tiles.sum()
    worst = max(dealt) / (tiles.sum() / MULTIPROCESSORS)
    rounds = np.pad(tiles, (0, -len(tiles) % MULTIPROCESSORS)).reshape(-1, MULTIPROCESSORS)
    in_rounds = rounds.sum(axis=0).max() / (tiles.sum() / MULTIPROCESSORS)
    print(
        f"{mix}, {num_kv_heads} kv heads: worst {worst:.3f} of the mean, {in_rounds:.3f} in rounds"
    )
    assert worst <= 1.035
