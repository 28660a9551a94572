"""The cache of ``generate_batch``: pages, and rings of slots where there is a window."""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend.integrations.transformers.shared import LAYOUT, OPS, Tables, same_strides


def is_ring(allocator: Any) -> bool:
    """Whether the layers keep the last tokens of a sequence only, in a ring of slots."""
    return bool(allocator.layer_type == "sliding_attention")


def copies_cache(allocator: Any, kwargs: dict[str, Any]) -> bool:
    """Whether transformers copies a window and the new tokens, because a step also prefills."""
    return is_ring(allocator) and kwargs["max_length_q"] > 1


def updated_pages(
    allocator: Any,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, Tables]:
    """Writes the new keys and values; returns pages to attend to and their tables. `options` are
    arguments of ``kv_cache_update``, and empty where the cache is copied."""
    queries = kwargs["cu_seq_lens_q"]
    if not hasattr(queries, "xla_gpu_tables"):
        queries.xla_gpu_tables = {}  # lives as long as the step
    shared = queries.xla_gpu_tables
    has_ring = is_ring(allocator)
    must_copy = copies_cache(allocator, kwargs)
    if allocator.index not in shared:
        make = _tables_of_copy if must_copy else _tables_of_ring if has_ring else _tables_of_pages
        slots = None if must_copy else _slots(allocator, kwargs)
        shared[allocator.index] = make(allocator, kwargs), slots
    tables, slots = shared[allocator.index]

    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if must_copy:
        reads, writes = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
        copies = same_strides(*allocator.update(new_keys, new_values, layer, reads, writes))
        keys, values = (copy.unsqueeze(1) for copy in copies)
    else:
        keys, values = (x[:: _pages_of_block(allocator)] for x in allocator._kv_page_views[layer])
        options = {"value_cache": values, "kv_layout": LAYOUT} | options
        OPS.kv_cache_update(keys, new_keys, new_values, slots, **options)
    return keys, values, tables


def _pages_of_block(allocator: Any) -> int:
    """From a layer's page of K (or V) to its next: a block has one of each for every layer.
    transformers' views have the pages of others, too, so that K and V share memory."""
    return int(allocator.block_physical_stride // allocator.tokens_per_page)


def _slots(allocator: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The slots to write to, among the layer's own. transformers counts those of all pages."""
    writes = kwargs["write_index"][allocator.index]
    stride = allocator.block_physical_stride
    return writes // stride * allocator.tokens_per_page + writes % stride


def _tables_of_pages(allocator: Any, kwargs: dict[str, Any]) -> Tables:
    """The tables of layers with full attention. transformers gives the slots of all tokens."""
    slots = kwargs["read_index"][allocator.index]
    if not slots.numel():  # nothing was in the cache
        slots = kwargs["write_index"][allocator.index]
    starts = kwargs["cu_seq_lens_k"][allocator.layer_type]
    firsts = (starts[:-1, None] + _first_positions(allocator, kwargs)).clamp(max=len(slots) - 1)
    return _tables(allocator, kwargs, slots[firsts])


def _tables_of_ring(allocator: Any, kwargs: dict[str, Any]) -> Tables:
    """The tables of layers with a sliding window where each sequence decodes one token.
    transformers gives the slots of the tokens in the cache, the oldest first, and the new one's."""
    window = allocator.sliding_window
    new = kwargs["write_index"][allocator.index][: len(kwargs["cu_seq_lens_q"]) - 1, None]
    old = kwargs["read_index"][allocator.index]
    starts = kwargs["cu_seq_lens_k"][allocator.layer_type]
    num_old = (starts.diff() - 1)[:, None]
    position = kwargs["position_ids"][0][kwargs["cu_seq_lens_q"][:-1]][:, None]
    oldest = torch.where(position < window, 0, (position + 1) % window)
    age = (_first_positions(allocator, kwargs) - oldest) % window
    if not old.numel():
        old = new.flatten()
    slots = torch.where(age < num_old, old[(starts[:-1, None] + age).clamp(max=len(old) - 1)], new)
    return _tables(allocator, kwargs, slots)


def _tables_of_copy(allocator: Any, kwargs: dict[str, Any]) -> Tables:
    """The tables of a copy of all keys, in order, with a page for each token."""
    starts = kwargs["cu_seq_lens_k"][allocator.layer_type]
    count = kwargs["max_length_k"][allocator.layer_type]
    positions = torch.arange(count, dtype=torch.int32, device=starts.device)
    return _tables(allocator, kwargs, starts[:-1, None] + positions, page_size=1)


def _first_positions(allocator: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The position of the first token of each page of the longest sequence."""
    return torch.arange(
        0,
        kwargs["max_length_k"][allocator.layer_type],
        allocator.tokens_per_page,
        device=kwargs["cu_seq_lens_q"].device,
    )


def _tables(
    allocator: Any, kwargs: dict[str, Any], slots: torch.Tensor, page_size: int | None = None
) -> Tables:
    """Tables, given the slot of the first token of each page."""
    queries = kwargs["cu_seq_lens_q"]
    return Tables(
        context_lens=kwargs["cu_seq_lens_k"][allocator.layer_type].diff().int(),
        block_tables=(slots // (page_size or allocator.block_physical_stride)).int(),
        query_start_loc=queries.int(),
        num_seqs=queries.new_full((1,), len(queries) - 1, dtype=torch.int32),
    )
