"""The check of ``paged_attention``; ``csrc/paged_attention/params.h`` defines what the op means.

The rules are here. The handler (``csrc/paged_attention/handler.cc``) only guarantees memory safety,
for programs that were not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shared_ffi import _native, token_rows
from shared_ffi import kv_cache as _kv_cache
from shared_ffi import kv_layout as _kv_layout
from shared_ffi.spec import (
    MAX_INT64,
    NUMBERS,
    STORAGE_DTYPES,
    ArraySpec,
    Call,
    Extremes,
    Operands,
    Scalar,
    check_array,
    check_is_on_host,
    dtype_error,
    excess_error,
    flag,
    float_attribute,
    has_shape,
    holds,
    integers_on_host,
    is_symbol,
    numbers_of,
    on_host,
    records_options,
    shape_error,
    value_error,
)

OP = "paged_attention"
TARGET = "xla_gpu_paged_attention"
MAX_HEAD_SIZE = 576
MAX_CONTEXT_LEN = 2**31 - 1024
"""``kMaxContextLen`` of ``csrc/paged_attention/params.h``."""

MAX_TREE_TOKENS = 64
"""The most query tokens of a sequence with a tree mask; no sliding window is shorter."""

METADATA = ("context_lens", "block_tables", "query_start_loc", "num_seqs")
"""The arrays that describe a batch, in the order of their operands."""

TOKEN_PAIRS = ("tree_mask", "bidirectional_ranges")
"""The optional arrays with two integers for each token, in the order of their operands."""

_PAIRS = {"tree_mask": "words of 32 bits", "bidirectional_ranges": "positions"}
_MAX_MASK_VALUE = -1e4
_MAX_SCALE = 2.0**126


@records_options
def check(
    query: ArraySpec,
    kv_cache: ArraySpec,
    context_lens: ArraySpec,
    block_tables: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    value_cache: ArraySpec | None = None,
    kv_layout: str | None = None,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
    sinks: ArraySpec | None = None,
    alibi_slopes: ArraySpec | None = None,
    tree_mask: ArraySpec | None = None,
    bidirectional_ranges: ArraySpec | None = None,
    causal: bool | ArraySpec = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    value_head_size: int | None = None,
    return_lse: bool = False,
    codes: str | None = None,
    k_global: ArraySpec | None = None,
    v_global: ArraySpec | None = None,
    op: str = OP,
) -> Call:
    """Returns the call, or raises ValueError (shape, value) or TypeError (dtype, type).

    `op`: the public function that makes the call, whose name is in messages.

    A feature that the call does not use adds nothing to it: neither operand nor attribute.
    """
    token_rows.check(op, "query", query)
    num_tokens, num_heads, head_size = query.shape
    if query.dtype not in STORAGE_DTYPES:
        raise dtype_error(op, "query", "dtype float32, float16 or bfloat16", query.dtype)
    if not (holds(head_size >= 1) and holds(head_size <= MAX_HEAD_SIZE)):
        rule = f"have a head_size from 1 to {MAX_HEAD_SIZE}"
        remedy = "Divide its last dimension into heads, if it holds several"
        raise value_error(op, "query", rule, head_size, remedy)
    is_latent = value_head_size is not None
    if value_head_size is not None:
        _check_value_head_size(op, value_head_size, head_size)
        _kv_cache.check_latent(op, value_cache, v_scale, v_global)
    cache, layout, caches = _kv_layout.check(
        op, kv_layout, kv_cache, value_cache, head_size, is_latent=is_latent
    )
    columns = head_size if value_head_size is None else int(value_head_size)
    if value_cache is not None:
        columns = value_cache.shape[-1] * numbers_of(value_cache.dtype)
    _kv_cache.check_dtypes(op, kv_cache, value_cache, "query", query.dtype)
    num_kv_heads = cache.num_kv_heads
    if not (holds(num_heads >= 1) and holds(num_heads % num_kv_heads == 0)):
        rule = f"be a multiple of num_kv_heads={num_kv_heads}"
        remedy = "Correct the heads of query, or those of K"
        raise value_error(op, "query's num_heads", rule, num_heads, remedy)
    metadata = (context_lens, block_tables, query_start_loc, num_seqs)
    check_metadata(op, *metadata)
    attributes: list[tuple[str, Scalar]] = [
        ("scale", _scale(op, scale)),
        ("sliding_window", _sliding_window(op, sliding_window)),
        ("soft_cap", _soft_cap(op, soft_cap, scale)),
    ]
    if is_latent or columns != head_size:
        attributes.append(("value_head_size", np.int64(columns)))
    attributes.extend(layout)
    attributes.extend(token_rows.attributes(query))
    operands = Operands(attributes)
    operands.add("query", token_rows.as_operand(query), 1)
    operands.add("kv_cache", caches[0], cache.head_dim)
    for name, array in zip(METADATA, metadata, strict=True):
        operands.add(name, array)
    _kv_cache.add_features(
        op,
        operands,
        cache,
        caches,
        k_scale,
        v_scale,
        codes=codes,
        global_scales=(k_global, v_global),
        row_sizes=(head_size, columns),
        is_quantized=kv_cache.dtype != query.dtype,
        is_latent=is_latent,
        reference_argument="query",
    )
    for feature, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None:
            remedy = "It has a number for each query head"
            check_array(op, feature, per_head, [("num_heads", num_heads)], "float32", remedy)
            operands.add_feature(feature, per_head, 0)
    for feature, pairs in zip(TOKEN_PAIRS, (tree_mask, bidirectional_ranges), strict=True):
        if pairs is not None:
            remedy = f"It has two {_PAIRS[feature]} for each token of query"
            check_array(op, feature, pairs, [("num_tokens", num_tokens), 2], "int32", remedy)
            operands.add_feature(feature, pairs, None)
    if not isinstance(causal, ArraySpec):
        causal = flag(op, "causal", causal)
    if tree_mask is not None:
        _check_beside_tree_mask(op, sliding_window, alibi_slopes, bidirectional_ranges, causal)
    right = _window_right(op, causal, window_right)
    if isinstance(causal, ArraySpec):
        (max_seqs,) = context_lens.shape
        if not has_shape(causal, (max_seqs,)):
            remedy = "It has a flag for each sequence, and for those that pad"
            if causal.shape == ():
                remedy = "For all sequences pass a bool, which jax.jit takes by static_argnames"
            raise shape_error(op, "causal", f"[max_seqs={max_seqs}]", causal.shape, remedy)
        if causal.dtype != "int32":
            raise dtype_error(op, "causal", "dtype int32 or bool", causal.dtype)
        operands.add_feature("causal", causal, None)
    if causal is not True:
        attributes.append(("window_right", right))
    if max_query_len is not None:
        attributes.append(("max_query_len", _max_query_len(op, max_query_len)))
    results = [ArraySpec((num_tokens, num_heads, columns), query.dtype)]
    if flag(op, "return_lse", return_lse):
        results.append(ArraySpec((num_tokens, num_heads), "float32"))
    return Call(
        op,
        TARGET,
        check,
        names=tuple(operands.names),
        operands=tuple(operands.specs),
        results=tuple(results),
        attributes=tuple(attributes),
        num_shared_heads=_num_shared_heads(query, cache),
        head_dims=(*operands.head_dims, *[1] * len(results)),
        cuda_scratch_bytes=cuda_scratch_bytes,
        check_on_cuda=_kv_cache.check_on_cuda,
    )


def check_metadata(
    op: str,
    context_lens: ArraySpec,
    block_tables: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
) -> None:
    """Checks the arrays that describe a batch; raises ValueError (shape) or TypeError (dtype)."""
    if len(context_lens.shape) != 1:
        remedy = "The lengths of all sequences are one array"
        raise shape_error(op, "context_lens", "[max_seqs]", context_lens.shape, remedy)
    (max_seqs,) = context_lens.shape
    if len(block_tables.shape) != 2 or not holds(block_tables.shape[0] == max_seqs):
        rule = f"[max_seqs={max_seqs}, max_blocks_per_seq]"
        remedy = "It has a row for each entry of context_lens"
        raise shape_error(op, "block_tables", rule, block_tables.shape, remedy)
    if not has_shape(query_start_loc, (max_seqs + 1,)):
        rule = f"[max_seqs + 1={max_seqs + 1}]"
        remedy = "It has the first token of each entry of context_lens, then the end"
        raise shape_error(op, "query_start_loc", rule, query_start_loc.shape, remedy)
    if not (has_shape(num_seqs, ()) or has_shape(num_seqs, (1,))):
        raise shape_error(op, "num_seqs", "[] or [1]", num_seqs.shape, "It is one number")
    arrays = (context_lens, block_tables, query_start_loc, num_seqs)
    for argument, spec in zip(METADATA, arrays, strict=True):
        if spec.dtype != "int32":
            raise dtype_error(op, argument, "dtype int32", spec.dtype)


def check_values(
    query: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    sliding_window: int | None = None,
    *,
    causal: Any = True,
    window_right: int | None = None,
    kv_layout: str | None = None,
    max_query_len: int | None = None,
    tree_mask: Any = None,
    bidirectional_ranges: Any = None,
) -> None:
    """Checks the values of lengths, page table, ``num_seqs`` and tree mask.

    The CPU handler checks them itself, by the same native function. On CUDA nothing waits for the
    device, and a faulty sequence's rows are NaN: call this with the same operands to learn why. It
    copies the integer arrays to the host.

    Raises:
        ValueError: in the words of the CPU handler, naming sequence and entry.
        TypeError: an array holds no integers, or has no values yet (under ``jax.jit``).
    """
    metadata = (context_lens, block_tables, query_start_loc, num_seqs)
    arrays = dict(zip(METADATA, metadata, strict=True))
    check_is_on_host(f"{OP}.check_values", **arrays, tree_mask=tree_mask, causal=causal)
    if bidirectional_ranges is not None:
        arrays["bidirectional_ranges"] = bidirectional_ranges
    # Integers of any width are welcome here. What int32 cannot hold is out of every range.
    limits = np.iinfo(np.int32)
    arrays = {
        name: np.clip(integers_on_host(OP, name, array), limits.min, limits.max).astype(
            np.int32, order="C"
        )
        for name, array in arrays.items()
    }
    pairs = {name: arrays[name] for name in TOKEN_PAIRS if name in arrays}
    if tree_mask is not None:
        pairs["tree_mask"] = _words(tree_mask)
    num_blocks, block_size = _kv_layout.num_blocks_and_size(OP, kv_layout, kv_cache.shape)
    if isinstance(causal, bool | np.bool_):
        causal = flag(OP, "causal", causal)
    else:
        causal = (on_host(causal) != 0).astype(np.int32, order="C")
    _window_right(OP, causal, window_right)
    error = _native.metadata_error(
        arrays["context_lens"],
        arrays["block_tables"],
        arrays["query_start_loc"],
        arrays["num_seqs"].item(),
        token_pairs=pairs,
        causal=None if isinstance(causal, bool) else causal,
        num_tokens=query.shape[0],
        num_blocks=num_blocks,
        block_size=block_size,
        sliding_window=_sliding_window(OP, sliding_window).item(),
        max_query_len=_max_query_len(OP, max_query_len).item(),
        is_causal=causal is True,
    )
    if error:
        raise ValueError(f"{OP}: {error}")


def _words(tree_mask: Any) -> np.ndarray:
    """A tree mask of integers of any width, signed or not, as words of 32 bits."""
    words = on_host(tree_mask)
    lost = words[(words < np.iinfo(np.int32).min) | (words > np.iinfo(np.uint32).max)]
    if lost.size > 0:
        raise value_error(OP, "tree_mask", "hold words of 32 bits", lost[0], "Give each token two")
    return words.astype(np.int32, order="C")


def cuda_scratch_bytes(call: Call, extremes: Extremes = NUMBERS) -> int:
    """The size of the scratch for partial results of long contexts, as ``MakeScratch`` of
    ``csrc/paged_attention/cuda/scratch.h`` computes it; the handler compares the two. Raises
    ValueError for sizes that only CUDA does not take.

    It follows from the shapes alone: only the device knows what the arrays hold. The numbers of
    tokens, sequences and blocks may be symbols.
    """
    _, kv_cache, _, block_tables, *_ = call.operands
    num_tokens, num_heads, value_head_size = call.results[0].shape
    max_seqs, max_blocks_per_seq = block_tables.shape
    attributes = dict(call.attributes)
    if "block_size" in attributes:
        block_size, num_kv_heads = int(attributes["block_size"]), int(attributes["num_kv_heads"])
    else:
        block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    # The handler checks symbols.
    if isinstance(num_tokens * num_heads, int) and num_tokens * num_heads >= 2**31:
        rule, got = "have num_tokens * num_heads below 2**31 on CUDA", f"{num_tokens} * {num_heads}"
        raise value_error(call.op, "query", rule, got, "Split the batch")
    if isinstance(block_size, int) and block_size >= 2**31:
        rule = "have a block_size below 2**31 on CUDA"
        raise value_error(call.op, "kv_cache", rule, block_size, "Make more and smaller blocks")
    return scratch_bytes(
        num_tokens,
        num_heads,
        num_kv_heads,
        value_head_size,
        max_seqs,
        max_blocks_per_seq * block_size,
        attributes,
        extremes,
    )


def scratch_bytes(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    value_head_size: int,
    max_seqs: int,
    longest: int,
    attributes: Mapping[str, Any],
    extremes: Extremes,
) -> int:
    """The same from the sizes. `longest`: the positions of a sequence, at most."""
    sizes = _native.scratch_sizes(
        num_heads=int(num_heads),
        num_kv_heads=int(num_kv_heads),
        value_head_size=int(value_head_size),
        sliding_window=int(attributes["sliding_window"]),
        max_query_len=int(attributes.get("max_query_len", 0)),
    )
    smaller, larger, are_quick = extremes
    # Each thread block has a slot, if there is a second leaf.
    has_slots = smaller(1, longest // (sizes.leaf + 1))
    # With symbols, JAX took minutes to compare what depends on this bound. A program of symbols is
    # refused by the handler for tables that have more positions.
    if isinstance(longest, int) or are_quick:
        longest = smaller(longest, sizes.max_length)
    groups = -(-longest // sizes.group) + 1
    max_splits = larger(
        smaller(sizes.split_limit, -(-longest // sizes.leaf) + 1),
        smaller(sizes.max_group_splits, groups),
    )
    partials_of_sequence = smaller(
        sizes.tile_tokens * larger(sizes.split_limit, max_splits),
        sizes.max_split_tokens * max_splits,
    )
    num_partials = smaller(num_tokens * max_splits, max_seqs * partials_of_sequence)
    # The decode kernel's partial results are of leaves, or of groups.
    tokens = smaller(num_tokens, max_seqs * sizes.decode_tokens)
    leaves = smaller(-(-longest // (2 * sizes.leaf)) + 3, longest // (sizes.leaf + 1) * 4)
    slots = larger(tokens * smaller(groups, sizes.most_group_slots), sizes.enough_slots)
    num_partials = larger(num_partials, smaller(tokens * leaves, slots))
    arrivals_of_head = 1 + smaller(groups, sizes.most_runs)
    num_flags = num_tokens + num_partials + 1 + max_seqs * (num_kv_heads * arrivals_of_head + 1)
    flags_bytes = sizes.flag_bytes * num_flags
    flags_bytes = -(-flags_bytes // sizes.alignment) * sizes.alignment
    num_bytes = flags_bytes + num_partials * sizes.partial_bytes
    num_bytes = -(-num_bytes // sizes.alignment) * sizes.alignment
    num_slots = smaller(num_tokens * num_heads * max_splits, sizes.max_slots)
    return num_bytes + has_slots * num_slots * sizes.slot_bytes


def _num_shared_heads(query: ArraySpec, cache: _kv_layout.KvLayout) -> int:
    """See Call. Strided queries are a part of an array whose heads are not known here."""
    if query.strides:
        return 0
    if cache.num_kv_heads == 1:
        return query.shape[1]
    return 0 if cache.head_dim is None else cache.num_kv_heads


def _check_value_head_size(op: str, value_head_size: int, head_size: int) -> None:
    if isinstance(value_head_size, bool) or not isinstance(value_head_size, int | np.integer):
        raise dtype_error(op, "value_head_size", "type int", type(value_head_size).__name__)
    if not 1 <= value_head_size <= head_size:
        rule = f"be from 1 to head_size={head_size}"
        remedy = "It counts the first numbers of K, which are V"
        raise value_error(op, "value_head_size", rule, value_head_size, remedy)


_USUAL_SCALE = "It is usually head_size ** -0.5"


def _scale(op: str, scale: float) -> np.float32:
    value = float_attribute(op, "scale", scale)
    if not np.isfinite(value):
        raise value_error(op, "scale", "be finite in float32", scale, _USUAL_SCALE)
    if abs(value) > _MAX_SCALE:
        raise value_error(op, "scale", "be at most 2**126 in magnitude", scale, _USUAL_SCALE)
    return value


def _int64(op: str, argument: str, value: int, at_least: int) -> np.int64:
    """Returns an int64 attribute. A SymInt is kept: converting it would specialize the program."""
    if isinstance(value, bool) or not (isinstance(value, int | np.integer) or is_symbol(value)):
        raise dtype_error(op, argument, "type int", type(value).__name__)
    if not holds(value >= at_least):
        remedy = f"Leave {argument} out if there is none"
        raise value_error(op, argument, f"be at least {at_least}, or None", value, remedy)
    return value if is_symbol(value) else np.int64(min(value, MAX_INT64))  # type: ignore[return-value]


def _sliding_window(op: str, sliding_window: int | None) -> np.int64:
    """As an attribute; 0 stands for none."""
    return (
        np.int64(0) if sliding_window is None else _int64(op, "sliding_window", sliding_window, 1)
    )


def _max_query_len(op: str, max_query_len: int | None) -> np.int64:
    """As an attribute; 0 stands for not known."""
    return np.int64(0) if max_query_len is None else _int64(op, "max_query_len", max_query_len, 1)


def _check_beside_tree_mask(
    op: str,
    sliding_window: int | None,
    alibi_slopes: ArraySpec | None,
    bidirectional_ranges: ArraySpec | None,
    causal: bool | ArraySpec,
) -> None:
    others = {"alibi_slopes": alibi_slopes, "bidirectional_ranges": bidirectional_ranges}
    for name, array in others.items():
        if array is not None:
            raise excess_error(op, name, "be None with tree_mask", array)
    if sliding_window is not None and not holds(sliding_window >= MAX_TREE_TOKENS):
        rule = f"be at least {MAX_TREE_TOKENS} with tree_mask"
        raise value_error(op, "sliding_window", rule, sliding_window, "Widen it, or leave it out")
    if causal is not True:
        raise excess_error(op, "causal", "be True with tree_mask", causal)


def _window_right(
    op: str, causal: bool | ArraySpec | np.ndarray, window_right: int | None
) -> np.int64:
    """As an attribute, which attention that is causal for all sequences does not have."""
    if causal is True:
        if window_right is not None:
            raise excess_error(op, "window_right", "be None unless causal is False", window_right)
        return np.int64(0)
    return (
        np.int64(MAX_INT64) if window_right is None else _int64(op, "window_right", window_right, 0)
    )


def check_mask_value(op: str, mask_value: float | None) -> None:
    """Raises ValueError for a `mask_value` of another library's kernel that weighs masked positions
    with more than 0. Here they do not enter the softmax, as with any that is far below logits."""
    if mask_value is not None and not mask_value <= _MAX_MASK_VALUE:
        rule = f"be None or at most {_MAX_MASK_VALUE:g}, as masked positions have no weight here"
        raise excess_error(op, "mask_value", rule, mask_value)


def _soft_cap(op: str, soft_cap: float | None, scale: float) -> np.float32:
    """As an attribute; 0 stands for none."""
    if soft_cap is None:
        return np.float32(0)
    value = float_attribute(op, "soft_cap", soft_cap)
    if not (np.isfinite(value) and value > 0):
        rule = "be positive and finite in float32, or None"
        raise value_error(op, "soft_cap", rule, soft_cap, "Leave soft_cap out if there is none")
    if abs(float(_scale(op, scale))) > _MAX_SCALE * float(value):
        rule = "be at least scale / 2**126 in magnitude"
        raise value_error(op, "soft_cap", rule, soft_cap, "Raise it, or leave it out")
    return value
