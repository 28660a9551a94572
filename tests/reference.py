"""The ops as their contract states them: float64, plain loops, nothing clever."""

from __future__ import annotations

from typing import Any

import numpy as np


def paged_attention(
    query: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """float64; reads nothing of the cache and the tables that is not attended to."""
    num_heads = query.shape[1]
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    scale = float(np.float32(scale))  # as the custom call carries it
    soft_cap = None if soft_cap is None else float(np.float32(soft_cap))
    output = np.zeros(query.shape)
    for s in range(int(np.asarray(num_seqs).item())):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        for i in range(end - start):
            position = int(context_lens[s]) - (end - start) + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            positions = range(first, position + 1)
            rows = [(block_tables[s, j // block_size], j % block_size) for j in positions]
            attended = np.array([kv_cache[row] for row in rows], np.float64)
            for h in range(num_heads):
                kv_head = h // (num_heads // num_kv_heads)
                keys, values = attended[:, 2 * kv_head], attended[:, 2 * kv_head + 1]
                with np.errstate(invalid="ignore"):
                    logits = scale * (keys @ query[start + i, h].astype(np.float64))
                    if soft_cap is not None:
                        logits = soft_cap * np.tanh(logits / soft_cap)
                    weights = np.exp(logits - logits.max())
                    output[start + i, h] = weights @ values / weights.sum()
    return output


def kv_cache_update(kv_cache: Any, key: Any, value: Any, slot_mapping: Any) -> np.ndarray:
    """The updated cache; `kv_cache` keeps its values."""
    updated = np.array(kv_cache)
    block_size = updated.shape[1]
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            block, offset = divmod(int(slot), block_size)
            updated[block, offset, 0::2] = key[token]
            updated[block, offset, 1::2] = value[token]
    return updated


def simple_add(a: Any, b: Any) -> np.ndarray:
    """Their sum."""
    return np.asarray(a + b)
