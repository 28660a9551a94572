"""Calls of serving code for TPUs, which also write the cache, and their results by the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness import layouts, reference
from harness.arrays import CACHE_DTYPES, DTYPES

ALL_DTYPES = DTYPES | CACHE_DTYPES
F32, I32 = np.float32, np.int32
Q_LENS, KV_LENS = [1, 1, 5, 12], [17, 8, 30, 12]
PAGE_SIZE, PAGES_PER_SEQ, MAX_SEQS = 8, 5, 6
NUM_PAGES = 40


def inputs(
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    shape: tuple[int, ...],
    cache_dtype: str | None = None,
) -> dict[str, Any]:
    """A call of serving code for TPUs. `shape`: the last three dimensions of the cache.
    `cache_dtype`: of the cache and of new keys and values, if it is not that of the queries."""
    rng = np.random.default_rng(0)
    num_tokens = sum(Q_LENS) + 3
    new_shape = (num_tokens, num_kv_heads, head_size)

    def normal(*size: int, dtype: str = cache_dtype or dtype) -> np.ndarray:
        return rng.standard_normal(size, F32).astype(ALL_DTYPES[dtype])

    padding = MAX_SEQS - len(KV_LENS)
    return {
        "queries": normal(num_tokens, num_heads, head_size, dtype=dtype),
        "keys": normal(*new_shape),
        "values": normal(*new_shape),
        "kv_cache": normal(NUM_PAGES, PAGE_SIZE, *shape),
        "kv_lens": np.array([*KV_LENS, *[7] * padding], I32),
        "page_indices": rng.permutation(NUM_PAGES)[: MAX_SEQS * PAGES_PER_SEQ].astype(I32),
        "cu_q_lens": np.array([*np.cumsum([0, *Q_LENS]), *[3] * padding], I32),
        "distribution": np.array([2, 2, len(Q_LENS)], I32),
    }


def oracle(call: dict[str, Any], *, is_one_row: bool, scale: float, **options: Any) -> Any:
    """The output and the updated cache in float64. The cache keeps its shape."""
    queries, keys, values, kv_cache = (
        call[name] for name in ("queries", "keys", "values", "kv_cache")
    )
    layout = "nbh(2d)" if is_one_row else None
    flat = kv_cache.reshape(NUM_PAGES, PAGE_SIZE, -1, kv_cache.shape[-1]).astype(np.float64)
    cache = layouts.default((flat,), layout)
    tables = call["page_indices"].reshape(MAX_SEQS, -1)
    for s, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        for i in range(q_len):
            page, offset = divmod(kv_len - q_len + i, PAGE_SIZE)
            row, token = cache[tables[s, page], offset], call["cu_q_lens"][s] + i
            row[:] = 0  # the padding
            for where, new in ((0, keys), (1, values)):
                row[where : 2 * keys.shape[1] : 2, : keys.shape[2]] = new[token]
    metadata = (call["kv_lens"], tables, call["cu_q_lens"], call["distribution"][2])
    own = cache[:, :, : 2 * keys.shape[1], : keys.shape[2]]
    output = reference.paged_attention(queries, own, *metadata, scale, **options)
    return output, layouts.arrange(cache, layout)[0].reshape(kv_cache.shape)
