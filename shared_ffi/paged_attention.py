"""The check of ``paged_attention``; what it means is told in ``csrc/paged_attention/params.h``.

The handler repeats these rules in the same order and words, for programs that reach it without
passing through here (``csrc/paged_attention/handler.cc``); a test compares the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shared_ffi import kv_layout as _kv_layout
from shared_ffi.spec import (
    STORAGE_DTYPES,
    ArraySpec,
    Call,
    Operands,
    Scalar,
    Smaller,
    dtype_error,
    on_host,
    shape_error,
    value_error,
)

OP = "paged_attention"
TARGET = "xla_gpu_paged_attention"
MAX_HEAD_SIZE = 512

_MAX_INT64 = np.iinfo(np.int64).max


def check(
    query: ArraySpec,
    kv_cache: ArraySpec,
    context_lens: ArraySpec,
    block_tables: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    *,
    value_cache: ArraySpec | None = None,
    kv_layout: str | None = None,
    k_scale: ArraySpec | None = None,
    v_scale: ArraySpec | None = None,
    sinks: ArraySpec | None = None,
    alibi_slopes: ArraySpec | None = None,
    causal: bool = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    return_lse: bool = False,
) -> Call:
    """Returns the call, or raises ValueError (shape, value) or TypeError (dtype, type).

    A feature that the call does not use adds nothing to it: neither operand nor attribute.
    """
    if len(query.shape) != 3:
        raise shape_error(OP, "query", "[num_tokens, num_heads, head_size]", query.shape)
    num_tokens, num_heads, head_size = query.shape
    if query.dtype not in STORAGE_DTYPES:
        raise dtype_error(OP, "query", "dtype float32, float16 or bfloat16", query.dtype)
    if not 1 <= head_size <= MAX_HEAD_SIZE:
        raise value_error(OP, "query", f"have a head_size from 1 to {MAX_HEAD_SIZE}", head_size)
    cache, layout, caches = _kv_layout.check(OP, kv_layout, kv_cache, value_cache, head_size)
    _kv_layout.check_dtypes(OP, kv_cache, value_cache, "query", query.dtype)
    num_kv_heads = cache.num_kv_heads
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        rule = f"be a multiple of num_kv_heads={num_kv_heads}"
        raise value_error(OP, "query's num_heads", rule, num_heads)
    if len(context_lens.shape) != 1:
        raise shape_error(OP, "context_lens", "[max_seqs]", context_lens.shape)
    (max_seqs,) = context_lens.shape
    if len(block_tables.shape) != 2 or block_tables.shape[0] != max_seqs:
        rule = f"[max_seqs={max_seqs}, max_blocks_per_seq]"
        raise shape_error(OP, "block_tables", rule, block_tables.shape)
    if query_start_loc.shape != (max_seqs + 1,):
        rule = f"[max_seqs + 1={max_seqs + 1}]"
        raise shape_error(OP, "query_start_loc", rule, query_start_loc.shape)
    if num_seqs.shape not in ((), (1,)):
        raise shape_error(OP, "num_seqs", "[] or [1]", num_seqs.shape)
    for argument, spec in (
        ("context_lens", context_lens),
        ("block_tables", block_tables),
        ("query_start_loc", query_start_loc),
        ("num_seqs", num_seqs),
    ):
        if spec.dtype != "int32":
            raise dtype_error(OP, argument, "dtype int32", spec.dtype)
    attributes: list[tuple[str, Scalar]] = [
        ("scale", _scale(scale)),
        ("sliding_window", _sliding_window(sliding_window)),
        ("soft_cap", _soft_cap(soft_cap)),
    ]
    attributes.extend(layout)
    operands = Operands(
        [query, caches[0], context_lens, block_tables, query_start_loc, num_seqs],
        [1, cache.head_dim, None, None, None, None],
        attributes,
    )
    _kv_layout.add_features(
        OP,
        operands,
        cache,
        caches,
        k_scale,
        v_scale,
        has_fewer_bits=kv_cache.dtype != query.dtype,
        than="query",
    )
    for feature, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is None:
            continue
        if per_head.shape != (num_heads,):
            raise shape_error(OP, feature, f"[num_heads={num_heads}]", per_head.shape)
        if per_head.dtype != "float32":
            raise dtype_error(OP, feature, "dtype float32", per_head.dtype)
        operands.add_feature(feature, per_head, 0)
    if right := _window_right(causal, window_right):
        attributes.append(("window_right", right))
    if max_query_len is not None:
        attributes.append(("max_query_len", _int64("max_query_len", max_query_len, 1)))
    results = [query]
    if _flag("return_lse", return_lse):
        results.append(ArraySpec((num_tokens, num_heads), "float32"))
    return Call(
        OP,
        TARGET,
        operands=tuple(operands.specs),
        results=tuple(results),
        attributes=tuple(attributes),
        num_kv_heads=0 if cache.head_dim is None else num_kv_heads,
        head_dims=(*operands.head_dims, *[1] * len(results)),
        cuda_scratch_bytes=cuda_scratch_bytes,
    )


def check_values(
    query: Any,
    kv_cache: Any,
    context_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    num_seqs: Any,
    sliding_window: int | None = None,
    *,
    causal: bool = True,
    window_right: int | None = None,
    kv_layout: str | None = None,
    max_query_len: int | None = None,
) -> None:
    """Says what is wrong with lengths, tables and ``num_seqs``, by their values.

    The CPU handler does so by itself. On CUDA nothing waits for the device, and a faulty sequence's
    rows are NaN: call this, with the operands of the call in question, to learn why. It copies the
    integer arrays to the host.

    Raises:
        ValueError: in the words of the CPU handler, naming sequence and entry.
    """
    lengths, tables, starts = map(on_host, (context_lens, block_tables, query_start_loc))
    count, max_seqs = int(on_host(num_seqs).item()), len(lengths)
    num_blocks, block_size = _kv_layout.sizes(kv_layout, kv_cache.shape)
    is_causal = _window_right(causal, window_right) == 0
    capacity, last = tables.shape[1] * block_size, num_blocks - 1
    if not 0 <= count <= max_seqs:
        raise value_error(OP, "num_seqs", f"be from 0 to max_seqs={max_seqs}", count)
    if count > 0 and starts[0] < 0:
        raise value_error(OP, "query_start_loc[0]", "be at least 0", starts[0])
    for s in range(count):
        start, end, context = int(starts[s]), int(starts[s + 1]), int(lengths[s])
        q_len, argument = end - start, f"context_lens[{s}]"
        if q_len < 0:
            got = f"query_start_loc[{s + 1}]={end} after query_start_loc[{s}]={start}"
            raise value_error(OP, "query_start_loc", "not decrease", got)
        if end > query.shape[0]:
            rule = f"be at most num_tokens={query.shape[0]}"
            raise value_error(OP, f"query_start_loc[{s + 1}]", rule, end)
        if max_query_len is not None and q_len > max_query_len:
            rule = f"give sequence {s} at most max_query_len={max_query_len} tokens"
            raise value_error(OP, "query_start_loc", rule, q_len)
        if not 0 <= context <= capacity:
            rule = f"be from 0 to max_blocks_per_seq * block_size={capacity}"
            raise value_error(OP, argument, rule, context)
        if is_causal and context < q_len:
            rule = f"count the sequence's {q_len} query tokens too"
            raise value_error(OP, argument, rule, context)
        window = context if sliding_window is None else sliding_window
        first = max(0, context - q_len - window + 1) // block_size
        needed = tables[s, first : -(-context // block_size)] if q_len > 0 else tables[s, :0]
        for b in np.flatnonzero((needed < 0) | (needed > last))[:1]:
            rule = f"be from 0 to num_blocks - 1={last}"
            raise value_error(OP, f"block_tables[{s}, {first + b}]", rule, needed[b])


def cuda_scratch_bytes(call: Call, smaller: Smaller = min) -> int:
    """Memory for partial results of long contexts, as ``csrc/paged_attention/scratch.h`` lays it
    out; the handler compares the two.

    It follows from the shapes alone: what the arrays hold is known on the device only. Sizes may be
    symbols, of which `smaller` finds the smaller one.
    """
    query, kv_cache, _, block_tables, *_ = call.operands
    num_tokens, num_heads, head_size = query.shape
    max_seqs, max_blocks_per_seq = block_tables.shape
    attributes = dict(call.attributes)
    if "block_size" in attributes:
        block_size, num_kv_heads = int(attributes["block_size"]), int(attributes["num_kv_heads"])
    else:
        block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    split_limit = max(32, 256 // num_kv_heads)
    max_split_tokens = max(1, 64 * num_kv_heads // num_heads)
    longest = max_blocks_per_seq * block_size
    if window := int(attributes["sliding_window"]):
        longest = smaller(longest, min(window, _MAX_INT64 // 2) + max_split_tokens + 64)
    most_of_sequence = min(max_split_tokens, int(attributes.get("max_query_len", _MAX_INT64)))
    num_places = smaller(num_tokens, max_seqs * most_of_sequence)
    max_splits = smaller(split_limit, -(-longest // 256))
    flags_bytes = -(-4 * num_tokens // 16) * 16
    return flags_bytes + 4 * num_places * num_heads * max_splits * (head_size + 2)


def _float32(argument: str, value: float) -> np.float32:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise dtype_error(OP, argument, "type float", type(value).__name__)
    with np.errstate(over="ignore"):
        return np.float32(value)


def _scale(scale: float) -> np.float32:
    value = _float32("scale", scale)
    if not np.isfinite(value):
        raise value_error(OP, "scale", "be finite in float32", scale)
    return value


def _int64(argument: str, value: int, at_least: int) -> np.int64:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise dtype_error(OP, argument, "type int", type(value).__name__)
    if value < at_least:
        raise value_error(OP, argument, f"be at least {at_least}", value)
    return np.int64(min(value, _MAX_INT64))


def _flag(argument: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise dtype_error(OP, argument, "type bool", type(value).__name__)
    return value


def _sliding_window(sliding_window: int | None) -> np.int64:
    """As an attribute; 0 stands for none."""
    return np.int64(0) if sliding_window is None else _int64("sliding_window", sliding_window, 1)


def _window_right(causal: bool, window_right: int | None) -> np.int64:
    """As an attribute; 0 stands for causal."""
    if _flag("causal", causal):
        if window_right is not None:
            rule = "be None unless causal is False"
            raise value_error(OP, "window_right", rule, window_right)
        return np.int64(0)
    return np.int64(_MAX_INT64) if window_right is None else _int64("window_right", window_right, 0)


def _soft_cap(soft_cap: float | None) -> np.float32:
    """As an attribute; 0 stands for none."""
    if soft_cap is None:
        return np.float32(0)
    value = _float32("soft_cap", soft_cap)
    if not (np.isfinite(value) and value > 0):
        raise value_error(OP, "soft_cap", "be positive and finite in float32", soft_cap)
    return value
