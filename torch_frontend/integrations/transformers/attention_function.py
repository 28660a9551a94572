"""The attention function, and what it refuses."""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend.integrations.transformers.fused_update import StandIn
from torch_frontend.integrations.transformers.masks import Mask
from torch_frontend.integrations.transformers.paged_cache import is_ring, updated_pages
from torch_frontend.integrations.transformers.rows import pages_of_rows
from torch_frontend.integrations.transformers.shared import LAYOUT, NAME, OPS, remedy


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers.

    Args:
        module: the layer, or what stands for it.
        query: ``[batch, num_heads, query_len, head_size]``; with a paged cache the batch is 1, and
            the tokens of all sequences follow one another.
        key: ``[batch, num_kv_heads, key_len, head_size]``.
        value: as ``key``, or with a smaller head size.
        attention_mask: from ``mask``; None: no padding.
        scaling: factor of ``q . k``; None: ``head_size ** -0.5``.
        kwargs: what the model and the cache add, such as ``sliding_window`` and ``softcap``.

    Returns:
        ``[batch, query_len, num_heads, head_size of value]``, and no weights.

    Raises:
        NotImplementedError: another mask than `mask` knows, two different windows, or a keyword
            that this function does not know.
    """
    update: dict[str, Any] = {}
    batch, num_heads, query_len, head_size = query.shape
    rows = query.transpose(1, 2).reshape(-1, num_heads, head_size)
    if isinstance(module, StandIn):
        kwargs["cache"] = module.cache
        if update := module.update_arguments():
            rows = rows.contiguous()
            update["query"] = rows
        module = module.module
    _refuse_unknown_keywords(module, kwargs)
    _refuse_other_masks(module, attention_mask, query.shape[2], key.shape[2], kwargs)
    cache = kwargs.get("cache")
    if cache is None:
        keys, values, tables = pages_of_rows(query.shape[2], key, value, attention_mask)
        max_query_len = query.shape[2]
        allocator = None
    else:
        allocator = cache.layer_to_allocator[module.layer_idx]
        layer = module.layer_idx
        keys, values, tables = updated_pages(allocator, layer, key, value, kwargs, update)
        max_query_len = kwargs["max_length_q"]
    sinks = kwargs.get("s_aux")
    output = OPS.paged_attention(
        rows,
        keys,
        *tables[:4],
        head_size**-0.5 if scaling is None else scaling,
        _window(module, attention_mask, allocator, kwargs),
        kwargs.get("softcap"),
        value_cache=values,
        kv_layout=LAYOUT,
        sinks=None if sinks is None else sinks.float(),
        bidirectional_ranges=tables.bidirectional_ranges,
        max_query_len=1 if max_query_len == 1 else None,
    )
    return output.view(batch, query_len, num_heads, -1), None


_READ = {"sliding_window", "softcap", "s_aux", "is_causal"}
_READ_WITH_CACHE = {
    "cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "read_index",
    "write_index",
}
_HARMLESS = {
    # Keys and queries are rotated, and the mask regards packed sequences and images.
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "cache_position",  # of callers written for transformers 4
    # What the model does with the results.
    "ignore_index",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "num_logits_to_keep",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "return_loss",
    "shift_labels",
    "use_cache",
    # In continuous batching:
    "logits_indices",
    "logits_processor_args",
}
_HARMLESS_VALUES: dict[str, Any] = {"dropout": 0, "output_attentions": False}


def _remedy(module: Any) -> str:
    return remedy(getattr(module, "config", None))


def _refuse_unknown_keywords(module: Any, kwargs: dict[str, Any]) -> None:
    known = _READ | _HARMLESS | (_READ_WITH_CACHE if kwargs.get("cache") is not None else set())
    for name, given in kwargs.items():
        if name in known or given is None:
            continue
        must = _HARMLESS_VALUES.get(name)
        if must is not None and given == must:
            continue
        got = f"a tensor {[*given.shape]}" if isinstance(given, torch.Tensor) else repr(given)
        raise NotImplementedError(
            f"{NAME}: {name} must be {must}; {type(module).__name__} gave {got}; {_remedy(module)}"
        )


def _refuse_other_masks(
    module: Any, mask: Any, query_len: int, key_len: int, kwargs: dict[str, Any]
) -> None:
    if mask is not None and not isinstance(mask, Mask):
        raise NotImplementedError(
            f"{NAME}: attention_mask must be the one that transformers makes for {NAME}; "
            f"{type(module).__name__} gave a {type(mask).__name__} {[*mask.shape]}; "
            f"{_remedy(module)}"
        )
    is_causal = kwargs.get("is_causal")
    if is_causal is None:  # with images, a mask says more than the module
        is_causal = mask is not None or getattr(module, "is_causal", True)
    has_cache = kwargs.get("cache") is not None
    if mask is not None and (mask.facts is None or (mask.facts.is_packed and not has_cache)):
        is_causal = False
    if not is_causal:
        raise NotImplementedError(
            f"{NAME}: the mask must be causal, with a window or without, with images or without; "
            f"got another one from {type(module).__name__}; {_remedy(module)}"
        )
    if mask is not None and not has_cache and mask.shape[2:] != (query_len, key_len):
        raise NotImplementedError(
            f"{NAME}: the mask must be for {query_len} queries and {key_len} keys as "
            f"{type(module).__name__} has them; got one for {[*mask.shape[2:]]}; {_remedy(module)}"
        )


def _window(module: Any, mask: Mask | None, allocator: Any, kwargs: dict[str, Any]) -> int | None:
    """The window, which the layer, the mask and the paged cache may name."""
    named: dict[str, int | None] = {}
    if kwargs.get("sliding_window") is not None:
        named["layer"] = kwargs["sliding_window"]
    if mask is not None and mask.facts is not None:
        named["mask"] = mask.facts.window
    if allocator is not None:
        named["cache"] = allocator.sliding_window if is_ring(allocator) else None
    if len({*named.values()}) > 1:
        raise NotImplementedError(
            f"{NAME}: the window must be the same for layer, mask and cache; got {named} from "
            f"{type(module).__name__}; {_remedy(module)}"
        )
    return next(iter(named.values()), None)
