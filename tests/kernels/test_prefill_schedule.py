"""How evenly query tiles are dealt to the thread blocks of an H200, by a model of `ItemCounter`. `-s`
prints the worst share of each mix of lengths."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from examples.replay import trace

THREAD_BLOCKS = 132
ROWS, TILE = 128, 128  # of the Hopper kernel: rows of a query tile, positions of a KV tile
HEADS = 32


def items(prompts: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """The KV tiles of each work item of causal attention, in the order of their numbers."""
    tokens = ROWS * num_kv_heads // HEADS
    of_prompts = []
    for prompt in prompts:
        ends = np.minimum(np.arange(tokens, prompt + tokens, tokens), prompt)[::-1]
        of_prompts.append(np.repeat(-(-ends // TILE), num_kv_heads))
    return np.concatenate(of_prompts)


def shares(tiles: np.ndarray) -> list[int]:
    """The KV tiles of each thread block. A block that has none left takes the next item."""
    dealt = [0] * THREAD_BLOCKS
    for tiles_of_item in tiles:
        heapq.heapreplace(dealt, dealt[0] + int(tiles_of_item))
    return dealt


def prompts_of(mix: str) -> np.ndarray:
    count, _, length = mix.partition(" x ")
    if length.isdigit():
        return np.full(int(count), int(length))
    lengths = [x.prompt_tokens for x in trace.generate(4096) if x.prompt_tokens > ROWS]
    return np.array(lengths[: int(count)])


@pytest.mark.parametrize("num_kv_heads", [8, 32])
@pytest.mark.parametrize(
    "mix",
    ["1 x 2048", "1 x 8192", "1 x 16384", "2 x 4096", "4 x 2048", "16 x chat", "64 x chat"],
)
def test_thread_blocks_end_together(mix: str, num_kv_heads: int) -> None:
    tiles = items(prompts_of(mix), num_kv_heads)
    dealt = shares(tiles)
    assert sum(dealt) == tiles.sum()
    worst = max(dealt) / (tiles.sum() / THREAD_BLOCKS)
    rounds = np.pad(tiles, (0, -len(tiles) % THREAD_BLOCKS)).reshape(-1, THREAD_BLOCKS)
    in_rounds = rounds.sum(axis=0).max() / (tiles.sum() / THREAD_BLOCKS)
    print(
        f"{mix}, {num_kv_heads} kv heads: worst {worst:.3f} of the mean, {in_rounds:.3f} in rounds"
    )
    assert worst <= 1.035
