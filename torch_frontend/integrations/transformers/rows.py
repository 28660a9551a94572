"""The cache of ``generate``: the keys of a sequence in one row."""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend.integrations.transformers.masks import Mask
from torch_frontend.integrations.transformers.masks import mask as make_mask
from torch_frontend.integrations.transformers.shared import Tables, same_strides


def pages_of_rows(
    query_len: int, key: torch.Tensor, value: torch.Tensor, mask: Mask | None
) -> tuple[torch.Tensor, torch.Tensor, Tables]:
    """Pages of the keys and values of ``generate``, and the tables for its batch."""
    if mask is None:
        mask = make_mask(len(key), query_len, key.shape[2], device=key.device)
    tables = mask.tables
    if "has_padding" not in tables:
        tables["has_padding"] = bool(mask.bounds[:, 0].any())
    if not tables["has_padding"]:
        if "rows" not in tables:
            tables["rows"] = _tables_of_rows(query_len, mask)
        keys, values = same_strides(key.transpose(1, 2), value.transpose(1, 2))
        return keys, values, tables["rows"]
    keys, values, per_row = _tokens_as_pages(key, value)
    if per_row not in tables:
        tables[per_row] = _tables_of_tokens(query_len, mask, per_row)
    return keys, values, tables[per_row]


def _tables_of_rows(query_len: int, mask: Mask) -> Tables:
    batch = len(mask.bounds)
    numbers = torch.arange(batch + 1, dtype=torch.int32, device=mask.bounds.device)
    return Tables(
        context_lens=mask.bounds[:, 1].contiguous(),
        block_tables=numbers[:-1, None].contiguous(),
        query_start_loc=numbers * query_len,
        num_seqs=numbers[-1:],
        bidirectional_ranges=_ranges(mask, 0),
    )


def _ranges(mask: Mask, shifts: Any) -> torch.Tensor | None:
    """The ranges of ``paged_attention``.

    Args:
        mask: the result of `mask`.
        shifts: ``[batch, query_len, 1]`` or a number, the key at position 0 of a query's sequence.
    """
    ranges = mask.ranges
    return None if ranges is None else (ranges - shifts).reshape(-1, 2).contiguous()


def _tables_of_tokens(query_len: int, mask: Mask, per_row: int) -> Tables:
    """The tables for rows that begin with padding. Each row is two sequences: the queries of the
    padding attend to the padding, and what they return is not used."""
    first, end = mask.bounds.unbind(1)
    batch = len(first)
    padding = (first - end + query_len).clamp(min=0)  # queries
    numbers = torch.arange(batch + 1, dtype=torch.int32, device=first.device)
    positions = torch.arange(int(end.max()), dtype=torch.int32, device=first.device)
    starts = numbers[:-1] * per_row
    pairs = torch.stack([starts, starts + first], 1).reshape(-1, 1)
    last = (batch - 1) * per_row + end.max() - 1
    row_starts = numbers * query_len
    splits = torch.stack([row_starts[:-1], row_starts[:-1] + padding], 1).flatten()
    is_padding = torch.arange(query_len, device=first.device) < padding[:, None]
    return Tables(
        context_lens=torch.stack([padding, end - first], 1).flatten().int(),
        block_tables=(pairs + positions).clamp(max=last).int(),
        query_start_loc=torch.cat([splits, row_starts[-1:]]).int(),
        num_seqs=numbers[-1:] * 2,
        bidirectional_ranges=_ranges(mask, torch.where(is_padding, 0, first[:, None])[..., None]),
    )


def _tokens_as_pages(
    key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Views of the same memory with a page for each token, and the number of pages from one row to
    the next."""
    key, value = same_strides(key, value)
    if key.stride(0) % key.stride(2):
        key, value = key.contiguous(), value.contiguous()
    batch, num_heads, key_len, _ = key.shape
    per_row = key.stride(0) // key.stride(2)

    def pages(rows: torch.Tensor) -> torch.Tensor:
        _, head, token, element = rows.stride()
        shape = ((batch - 1) * per_row + key_len, 1, num_heads, rows.shape[3])
        return rows.as_strided(shape, (token, token, head, element))

    return pages(key), pages(value), per_row
