"""Importing this module makes ``attn_implementation="xla_gpu_paged"`` known to transformers.

``generate_batch`` keeps a paged cache. Layers with full attention write and read it where it lies.
A layer with a sliding window keeps the last ``window`` tokens of a sequence in a ring: position p
has slot ``p % window``. A step in which each sequence decodes one token writes its slot and attends
to all slots, whose order does not matter then. A step that also prefills must read tokens before it
overwrites them: transformers copies the window and the new tokens, and attention reads that copy.

``generate`` keeps the keys of a sequence in one row, which serves as a page, or as one page for
each token if rows begin with padding.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import torch_frontend  # noqa: F401  (defines the ops)
from torch_frontend.integrations._versions import require

require("transformers", "5.23", "5.24")

from transformers.generation.continuous_batching import ContinuousBatchingManager  # noqa: E402
from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel  # noqa: E402

NAME = "xla_gpu_paged"
_REMEDY = "use attn_implementation='sdpa' or 'eager' for this model"

_OPS = torch.ops.xla_gpu
_LAYOUT = "nbhd"


class _Tables(NamedTuple):
    """The arguments of ``paged_attention`` that all layers of one kind share in a step."""

    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    num_seqs: torch.Tensor
    bidirectional_ranges: torch.Tensor | None = None


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
        module: the layer.
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
    _refuse_unknown_keywords(module, kwargs)
    _refuse_other_masks(module, attention_mask, query.shape[2], key.shape[2], kwargs)
    cache = kwargs.get("cache")
    if cache is None:
        keys, values, tables = _rows(query.shape[2], key, value, attention_mask)
        max_query_len = query.shape[2]
        allocator = None
    else:
        allocator = cache.layer_to_allocator[module.layer_idx]
        keys, values, tables = _pages(allocator, module.layer_idx, key, value, kwargs)
        max_query_len = kwargs["max_length_q"]
    sinks = kwargs.get("s_aux")
    batch, num_heads, query_len, head_size = query.shape
    output = _OPS.paged_attention(
        query.transpose(1, 2).reshape(-1, num_heads, head_size),
        keys,
        *tables[:4],
        head_size**-0.5 if scaling is None else scaling,
        _window(module, attention_mask, allocator, kwargs),
        kwargs.get("softcap"),
        value_cache=values,
        kv_layout=_LAYOUT,
        sinks=None if sinks is None else sinks.float(),
        bidirectional_ranges=tables.bidirectional_ranges,
        max_query_len=1 if max_query_len == 1 else None,
    )
    return output.view(batch, query_len, num_heads, -1), None


class Mask(torch.Tensor):
    """What `mask` returns: a tensor with the shape of a mask, ``[batch_size, 1, q_length,
    kv_length]``, and without numbers. `attention` reads its attributes. A model may move it to
    another device and take its last queries; whatever else it computes with it is an error."""

    model: str
    """The model's type, for errors."""
    facts: _Facts | None
    """None: the mask says what `attention` cannot do."""
    bounds: torch.Tensor
    """``[batch_size, 2]`` int32: the first key of each row that is not padding, and the number of
    keys in a row."""
    ranges: torch.Tensor | None
    """``[batch_size, q_length, 2]`` int32 if images attend to themselves: the keys of the image of
    each query, from the first number up to but not including the second."""
    tables: dict[Any, Any]
    """What `attention` derived for one layer and uses in the others."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, shape: tuple[int, ...], **attributes: Any) -> Mask:
        """A mask with a shape and the attributes above, ``tables`` excepted."""
        device = attributes["bounds"].device
        created = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        vars(created).update(attributes, tables={})
        return created

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Mask({[*self.shape]}, {self.facts})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        this = next(x for x in leaves if isinstance(x, cls))
        dtype = (kwargs or {}).get("dtype", torch.bool)
        if function is torch.ops.aten._to_copy.default and dtype is torch.bool:
            moved = {
                name: x.to(kwargs["device"]) if isinstance(x, torch.Tensor) else x
                for name, x in vars(this).items()
            }
            return cls.of(this.shape, **moved)
        if function in (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default):
            queries = torch.arange(this.shape[2]).view(1, 1, -1, 1).expand(this.shape)
            left = function(queries, *args[1:])
            first = this.shape[2] - left.shape[2]
            others = [*left.shape[:2], *left.shape[3:]]
            is_end = left.numel() and left[0, 0, :, 0].tolist() == [*range(first, this.shape[2])]
            if is_end and others == [*this.shape[:2], *this.shape[3:]]:
                ranges = None if this.ranges is None else this.ranges[:, first:]
                return cls.of(left.shape, **vars(this) | {"ranges": ranges})
        raise NotImplementedError(
            f"{NAME}: the attention mask must be read by the attention function only; got "
            f"{function} in the code of the model {this.model!r}; {_REMEDY}"
        )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> Mask:
    """A mask function of transformers.

    Raises:
        NotImplementedError: padding after a token, or images that are mixed.
    """
    end = int(q_offset) + q_length - kv_offset
    device = torch.device(device)
    bounds = torch.zeros(batch_size, 2, dtype=torch.int32, device=device)
    bounds[:, 1] = end
    facts, ranges = _Facts.of(mask_function), None
    if facts is not None and attention_mask is not None:
        is_token = attention_mask[:, kv_offset : kv_offset + end].bool()
        if (is_token[:, :-1] & ~is_token[:, 1:]).any():
            raise NotImplementedError(f"{NAME}: padding must come first; set padding_side='left'")
        bounds[:, 0] = end - is_token.sum(1)
    if facts is not None and facts.images is not None:
        images = facts.images[:, kv_offset : kv_offset + end].to(device)
        ranges = _image_ranges(images)[:, -q_length:].int()
        if facts.window is not None and facts.window_bounds_images:
            positions = torch.arange(end - q_length, end, device=device)
            ranges[..., 0] = ranges[..., 0].maximum(positions - facts.window + 1)
    return Mask.of(
        (batch_size, 1, q_length, kv_length),
        model=getattr(config, "model_type", "?"),
        facts=facts,
        bounds=bounds,
        ranges=ranges,
    )


def _image_ranges(images: torch.Tensor) -> torch.Tensor:
    """The tokens of the image of each token, ``[batch, length, 2]``; none for text.

    Args:
        images: ``[batch, length]``, the number of each token's image; negative: text.
    """
    length = images.shape[1]
    positions = torch.arange(length, device=images.device)
    begins = torch.ones_like(images, dtype=torch.bool)
    begins[:, 1:] = images[:, 1:] != images[:, :-1]
    ordered = images.sort(1).values
    is_new = torch.ones_like(begins)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    if ((begins & (images >= 0)).sum(1) != (is_new & (ordered >= 0)).sum(1)).any():
        raise NotImplementedError(f"{NAME}: the tokens of an image must lie side by side")
    first = torch.where(begins, positions, 0).cummax(1).values
    ends = torch.ones_like(begins)
    ends[:, :-1] = begins[:, 1:]
    last = torch.where(ends, positions, length).flip(1).cummin(1).values.flip(1)
    return torch.stack([first, last + 1], 2) * (images >= 0)[..., None]


class _Facts(NamedTuple):
    """What a mask of transformers says besides causality."""

    window: int | None = None
    """How many keys a query attends to, its own included."""
    images: torch.Tensor | None = None
    """The number of each token's image, whose tokens attend to each other; negative: text."""
    window_bounds_images: bool = False
    is_packed: bool = False
    """Whether a row has several sequences."""

    @classmethod
    def of(cls, function: Any) -> _Facts | None:
        """Recognizes transformers' mask function by its code; None: another one."""
        if function is causal_mask_function:
            return cls()
        code = getattr(function, "__code__", None)
        if code not in (_AND, _OR) or len(parts := _captured(function)) != 2:
            return None
        codes = [getattr(x, "__code__", None) for x in parts]
        if code is _AND and codes == [_PACKED, _REMAPPED]:
            facts = cls.of(_captured(parts[1]))
            return facts and facts._replace(is_packed=True)
        kind = _WINDOW if code is _AND else _IMAGES
        if codes.count(kind) != 1:
            return None
        added = codes.index(kind)
        facts, value = cls.of(parts[1 - added]), _captured(parts[added])
        if facts is None or facts.is_packed:
            return None
        if code is _OR:
            return facts._replace(images=value) if facts.images is None else None
        if facts.window is not None:
            return None
        return facts._replace(window=value, window_bounds_images=facts.images is not None)


def _captured(function: Any) -> Any:
    """The variable that a mask function of transformers has from the function that made it; of
    several the first in the order of their names."""
    return function.__closure__[0].cell_contents


_AND, _OR, _WINDOW, _IMAGES, _PACKED, _REMAPPED = (
    x.__code__  # type: ignore[attr-defined]
    for x in (
        and_masks(causal_mask_function),
        or_masks(causal_mask_function),
        sliding_window_overlay(1),
        blockwise_overlay(torch.empty(0)),
        packed_sequence_mask_function(torch.empty(0)),
        remap_positions_for_packed_sequence(causal_mask_function, torch.empty(0)),
    )
)

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
    # What the model does with the results.
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "use_cache",
    # In continuous batching:
    "logits_indices",
    "logits_processor_args",
}
_HARMLESS_VALUES: dict[str, Any] = {"dropout": 0, "output_attentions": False}


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
            f"{NAME}: {name} must be {must}; {type(module).__name__} gave {got}; {_REMEDY}"
        )


def _refuse_other_masks(
    module: Any, mask: Any, query_len: int, key_len: int, kwargs: dict[str, Any]
) -> None:
    if mask is not None and not isinstance(mask, Mask):
        raise NotImplementedError(
            f"{NAME}: attention_mask must be the one that transformers makes for {NAME}; "
            f"{type(module).__name__} gave a {type(mask).__name__} {[*mask.shape]}; {_REMEDY}"
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
            f"got another one from {type(module).__name__}; {_REMEDY}"
        )
    if mask is not None and not has_cache and mask.shape[2:] != (query_len, key_len):
        raise NotImplementedError(
            f"{NAME}: the mask must be for {query_len} queries and {key_len} keys as "
            f"{type(module).__name__} has them; got one for {[*mask.shape[2:]]}; {_REMEDY}"
        )


def _window(module: Any, mask: Mask | None, allocator: Any, kwargs: dict[str, Any]) -> int | None:
    """The window, which the layer, the mask and the paged cache may name."""
    named: dict[str, int | None] = {}
    if kwargs.get("sliding_window") is not None:
        named["layer"] = kwargs["sliding_window"]
    if mask is not None and mask.facts is not None:
        named["mask"] = mask.facts.window
    if allocator is not None:
        named["cache"] = allocator.sliding_window if _is_ring(allocator) else None
    if len({*named.values()}) > 1:
        raise NotImplementedError(
            f"{NAME}: the window must be the same for layer, mask and cache; got {named} from "
            f"{type(module).__name__}; {_REMEDY}"
        )
    return next(iter(named.values()), None)


def _is_ring(allocator: Any) -> bool:
    return bool(allocator.layer_type == "sliding_attention")


def _rows(
    query_len: int, key: torch.Tensor, value: torch.Tensor, mask: Mask | None
) -> tuple[torch.Tensor, torch.Tensor, _Tables]:
    """Pages of the keys and values of ``generate``, and the tables for its batch."""
    if mask is None:
        mask = globals()["mask"](len(key), query_len, key.shape[2], device=key.device)
    tables = mask.tables
    if "has_padding" not in tables:
        tables["has_padding"] = bool(mask.bounds[:, 0].any())
    if not tables["has_padding"]:
        if "rows" not in tables:
            tables["rows"] = _tables_of_rows(query_len, mask)
        keys, values = _same_strides(key.transpose(1, 2), value.transpose(1, 2))
        return keys, values, tables["rows"]
    keys, values, per_row = _tokens_as_pages(key, value)
    if per_row not in tables:
        tables[per_row] = _tables_of_tokens(query_len, mask, per_row)
    return keys, values, tables[per_row]


def _tables_of_rows(query_len: int, mask: Mask) -> _Tables:
    batch = len(mask.bounds)
    numbers = torch.arange(batch + 1, dtype=torch.int32, device=mask.bounds.device)
    return _Tables(
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


def _tables_of_tokens(query_len: int, mask: Mask, per_row: int) -> _Tables:
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
    return _Tables(
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
    key, value = _same_strides(key, value)
    if key.stride(0) % key.stride(2):
        key, value = key.contiguous(), value.contiguous()
    batch, num_heads, key_len, _ = key.shape
    per_row = key.stride(0) // key.stride(2)

    def pages(rows: torch.Tensor) -> torch.Tensor:
        _, head, token, element = rows.stride()
        shape = ((batch - 1) * per_row + key_len, 1, num_heads, rows.shape[3])
        return rows.as_strided(shape, (token, token, head, element))

    return pages(key), pages(value), per_row


def _same_strides(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with the strides that ``paged_attention`` needs: the same, or in proportion
    to the head sizes."""
    if key.stride(-1) == value.stride(-1) == 1:
        pairs = [*zip(key.stride()[:-1], value.stride()[:-1], strict=True)]
        if all(x * value.shape[-1] == y * key.shape[-1] for x, y in pairs):
            return key, value
    return key.contiguous(), value.contiguous()


def _pages(
    allocator: Any, layer: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, _Tables]:
    """Writes the new keys and values; returns pages to attend to and their tables."""
    queries = kwargs["cu_seq_lens_q"]
    if not hasattr(queries, "xla_gpu_tables"):
        queries.xla_gpu_tables = {}  # lives as long as the step
    shared = queries.xla_gpu_tables
    is_ring = _is_ring(allocator)
    must_copy = is_ring and kwargs["max_length_q"] > 1
    if allocator.index not in shared:
        make = _tables_of_copy if must_copy else _tables_of_ring if is_ring else _tables_of_pages
        slots = None if must_copy else _slots(allocator, kwargs)
        shared[allocator.index] = make(allocator, kwargs), slots
    tables, slots = shared[allocator.index]

    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if must_copy:
        reads, writes = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
        copies = _same_strides(*allocator.update(new_keys, new_values, layer, reads, writes))
        keys, values = (copy.unsqueeze(1) for copy in copies)
    else:
        keys, values = (x[:: _pages_of_block(allocator)] for x in allocator._kv_page_views[layer])
        _OPS.kv_cache_update(
            keys, new_keys, new_values, slots, value_cache=values, kv_layout=_LAYOUT
        )
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


def _tables_of_pages(allocator: Any, kwargs: dict[str, Any]) -> _Tables:
    """The tables of layers with full attention. transformers gives the slots of all tokens."""
    slots = kwargs["read_index"][allocator.index]
    if not slots.numel():  # nothing was in the cache
        slots = kwargs["write_index"][allocator.index]
    starts = kwargs["cu_seq_lens_k"][allocator.layer_type]
    firsts = (starts[:-1, None] + _first_positions(allocator, kwargs)).clamp(max=len(slots) - 1)
    return _tables(allocator, kwargs, slots[firsts])


def _tables_of_ring(allocator: Any, kwargs: dict[str, Any]) -> _Tables:
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


def _tables_of_copy(allocator: Any, kwargs: dict[str, Any]) -> _Tables:
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
) -> _Tables:
    """Tables, given the slot of the first token of each page."""
    queries = kwargs["cu_seq_lens_q"]
    return _Tables(
        context_lens=kwargs["cu_seq_lens_k"][allocator.layer_type].diff().int(),
        block_tables=(slots // (page_size or allocator.block_physical_stride)).int(),
        query_start_loc=queries.int(),
        num_seqs=queries.new_full((1,), len(queries) - 1, dtype=torch.int32),
    )


def _accept_name() -> None:
    """Makes continuous batching accept our name. transformers has a fixed list of names."""
    upstream: Any = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def switch(self: Any, model: Any, *arguments: Any, **keywords: Any) -> None:
        if model.config._attn_implementation != NAME:
            upstream(self, model, *arguments, **keywords)

    manager: Any = ContinuousBatchingManager
    manager.switch_to_cb_friendly_attn = switch


def _refuse_classes() -> None:
    """Makes a model that has a class for each attention refuse our name in words."""
    upstream: Any = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(upstream)
    def check(self: Any, requested_attention: str | None, *arguments: Any, **keywords: Any) -> Any:
        if requested_attention == NAME:
            for name, classes in vars(sys.modules[type(self).__module__]).items():
                if name.endswith("_ATTENTION_CLASSES") and NAME not in classes:
                    raise NotImplementedError(
                        f"{NAME}: the model must call an attention function; "
                        f"{type(self).__name__} has {name} with {sorted(classes)}; {_REMEDY}"
                    )
        return upstream(self, requested_attention, *arguments, **keywords)

    model: Any = PreTrainedModel
    model.get_correct_attn_implementation = check


def _keep_pages() -> None:
    """Makes a paged cache leave keys and values to ``attention``, and give itself to it. Since
    transformers 5.24 a layer updates its cache itself and gives attention what the cache returns;
    before, attention got the cache and updated it."""
    upstream: Any = PagedAttentionCache.update

    @functools.wraps(upstream)
    def update(  # transformers gives some arguments by these names
        self: Any,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> Any:
        if self.config._attn_implementation != NAME:
            return upstream(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    cache: Any = PagedAttentionCache
    cache.update = update


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
_accept_name()
_refuse_classes()
_keep_pages()
