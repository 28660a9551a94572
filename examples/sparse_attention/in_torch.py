"""Sparse attention in PyTorch: functions to copy, which give attention another block table."""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend import Batch, merge_attention, paged_attention

LAST = torch.iinfo(torch.int32).max


def blocks_of_tokens(batch: Batch, num_tokens: int) -> torch.Tensor:
    """The row of block_tables of each token's sequence; any row for padding."""
    device, max_seqs = batch.block_tables.device, len(batch.block_tables)
    is_real = torch.arange(max_seqs, device=device) < batch.num_seqs
    ended = torch.arange(num_tokens, device=device)[:, None] >= batch.query_start_loc[1:]
    return batch.block_tables[(ended & is_real).sum(-1).clamp(max=max_seqs - 1)]


def starts_of_rows(num_rows: int, like: torch.Tensor) -> torch.Tensor:
    """Sequences of one token each."""
    return torch.arange(num_rows + 1, dtype=torch.int32, device=like.device)


def attend_to_positions(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    chosen: torch.Tensor,
    batch: Batch,
    scale: float,
    **options: Any,
) -> Any:
    """Attends to chosen positions, [num_tokens, k], of a cache with one row for all heads.

    kv_cache: [num_blocks, block_size, head_size].
    """
    num_tokens, block_size = len(query), kv_cache.shape[1]
    order = torch.where(chosen < 0, LAST, chosen).sort(-1).values
    tables = blocks_of_tokens(batch, num_tokens)
    blocks = tables.gather(1, (order // block_size).clamp(max=tables.shape[1] - 1).long())
    return paged_attention(
        query,
        kv_cache.view(-1, 1, kv_cache.shape[-1]),
        (chosen >= 0).sum(-1).int(),
        (blocks * block_size + order % block_size).int(),
        starts_of_rows(num_tokens, query),
        batch.query_start_loc[batch.num_seqs],
        scale,
        max_query_len=1,
        causal=False,  # a token may choose nothing
        **options,
    )


def attend_to_blocks(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    chosen: torch.Tensor,
    batch: Batch,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    """Attends to chosen blocks, [num_tokens, num_kv_heads, k], up to the token's own position.

    kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], whose layout is "nhb(2d)".
    """
    _, num_kv_heads, block_size, width = kv_cache.shape
    num_rows = len(query) * num_kv_heads
    order = torch.where(chosen < 0, LAST, chosen).sort(-1).values
    tables = blocks_of_tokens(batch, len(query))[:, None].expand(-1, num_kv_heads, -1)
    blocks = tables.gather(2, order.clamp(max=tables.shape[2] - 1).long())
    newest, offset = batch.positions // block_size, batch.positions % block_size
    has_newest = (chosen == newest[:, None, None]).any(-1)
    past = torch.where(has_newest, block_size - 1 - offset[:, None], 0)  # positions after the token
    heads = torch.arange(num_kv_heads, device=query.device)[:, None]
    output = paged_attention(
        query.reshape(num_rows, -1, query.shape[-1]),
        kv_cache.view(-1, 1, block_size, width),
        (block_size * (chosen >= 0).sum(-1) - past).reshape(-1).int(),
        (blocks * num_kv_heads + heads).reshape(num_rows, -1).int(),
        starts_of_rows(num_rows, query),
        batch.query_start_loc[batch.num_seqs] * num_kv_heads,
        scale,
        kv_layout="nhb(2d)",
        max_query_len=1,
        causal=False,  # a token may choose nothing
        **options,
    )
    return output.view(query.shape)


def attend_to_window_and_entries(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    entries: torch.Tensor,
    chosen: torch.Tensor,
    batch: Batch,
    entry_tables: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Attends to the newest positions, to chosen compressed entries, and to a sink."""
    near = paged_attention(
        query, kv_cache, *batch[3:], scale, window, sinks=sinks, return_lse=True, **options
    )
    of_entries = batch._replace(block_tables=entry_tables)
    far = attend_to_positions(query, entries, chosen, of_entries, scale, return_lse=True, **options)
    return merge_attention(*zip(near, far, strict=True))[0]
