"""The check of ``varlen_attention``, whose options are those of ``paged_attention``;
``csrc/varlen_attention/params.h`` says what the op means."""

from __future__ import annotations

import numpy as np

from shared_ffi import paged_attention, token_rows, varlen_scratch
from shared_ffi.spec import (
    ArraySpec,
    Call,
    Operands,
    Scalar,
    check_array,
    dtype_error,
    flag,
    has_shape,
    holds,
    records_options,
    shape_error,
    value_error,
)

OP = "varlen_attention"
TARGET = "xla_gpu_varlen_attention"

DIFFERENTIABLE = ("query", "key", "value", "sinks", "alibi_slopes")
"""The operands that have a gradient, if the call has them."""

FEATURES = ("sinks", "alibi_slopes", "bidirectional_ranges", "causal", "prefix_seqs")
"""The arrays that not every call has, in the order of their operands."""

_NUMBERS = ("scale", "sliding_window", "soft_cap", "window_right", "max_query_len")


@records_options
def check(
    query: ArraySpec,
    key: ArraySpec,
    value: ArraySpec,
    query_start_loc: ArraySpec,
    num_seqs: ArraySpec,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    sinks: ArraySpec | None = None,
    alibi_slopes: ArraySpec | None = None,
    bidirectional_ranges: ArraySpec | None = None,
    causal: bool | ArraySpec = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
    prefix_seqs: ArraySpec | None = None,
    return_lse: bool = False,
) -> Call:
    """Returns the call, or raises ValueError (shape, value) or TypeError (dtype, type)."""
    token_rows.check(OP, "query", query)
    token_rows.check(OP, "key", key, "num_kv_heads")
    num_tokens, num_heads, head_size = query.shape
    if not has_shape(key, (num_tokens, *key.shape[1:2], head_size)):
        rule = f"[num_tokens={num_tokens}, num_kv_heads, head_size={head_size}]"
        remedy = "It has the tokens and the head size of query"
        raise shape_error(OP, "key", rule, key.shape, remedy)
    num_kv_heads = key.shape[1]
    if not holds(num_kv_heads >= 1):
        rule = "have num_kv_heads of at least 1"
        raise value_error(OP, "key", rule, num_kv_heads, "Give key and value their heads")
    if not (
        has_shape(value, (num_tokens, num_kv_heads, *value.shape[2:3]))
        and holds(value.shape[2] <= head_size)
        and (holds(value.shape[2] >= 1) or not holds(head_size >= 1))
    ):
        rule = f"[num_tokens={num_tokens}, num_kv_heads={num_kv_heads}, 1 to {head_size}]"
        remedy = "It has the tokens and heads of key"
        raise shape_error(OP, "value", rule, value.shape, remedy)
    for argument, spec in (("key", key), ("value", value)):
        if spec.dtype != query.dtype:
            raise dtype_error(OP, argument, f"query's dtype {query.dtype}", spec.dtype)
    token_rows.check(OP, "value", value, "num_kv_heads")
    if len(query_start_loc.shape) != 1 or not holds(query_start_loc.shape[0] >= 1):
        remedy = "It has the first token of each sequence, then the end"
        raise shape_error(OP, "query_start_loc", "[max_seqs + 1]", query_start_loc.shape, remedy)
    if query_start_loc.dtype != "int32":
        raise dtype_error(OP, "query_start_loc", "dtype int32", query_start_loc.dtype)
    max_seqs = query_start_loc.shape[0] - 1
    # K and V as a cache with blocks of one position.
    paged = paged_attention.check(
        query._replace(strides=None),
        key._replace(strides=None),
        ArraySpec((max_seqs,), "int32"),
        ArraySpec((max_seqs, 1), "int32"),
        query_start_loc,
        num_seqs,
        scale,
        sliding_window,
        soft_cap,
        value_cache=value._replace(strides=None),
        kv_layout="nhd",
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        bidirectional_ranges=bidirectional_ranges,
        causal=causal,
        window_right=window_right,
        max_query_len=max_query_len,
        op=OP,
    )
    operands = Operands([(name, x) for name, x in paged.attributes if name in _NUMBERS])
    operands.attributes += row_attributes(query, key, value)
    kv_head_dim = None if num_kv_heads == 1 else 1
    for name, array, dim in (
        ("query", query, 1),
        ("key", key, kv_head_dim),
        ("value", value, kv_head_dim),
    ):
        operands.add(name, token_rows.as_operand(array), dim)
    operands.add("query_start_loc", query_start_loc)
    operands.add("num_seqs", num_seqs)
    for name, array, head_dim in zip(paged.names, paged.operands, paged.head_dims, strict=False):
        if name in FEATURES:
            operands.add_feature(name, array, head_dim)
    if prefix_seqs is not None:
        remedy = "It has a number for each sequence, and for those that pad"
        check_array(OP, "prefix_seqs", prefix_seqs, [("max_seqs", max_seqs)], "int32", remedy)
        operands.add_feature("prefix_seqs", prefix_seqs, None)
    results = [ArraySpec((num_tokens, num_heads, value.shape[2]), query.dtype)]
    if flag(OP, "return_lse", return_lse):
        results.append(ArraySpec((num_tokens, num_heads), "float32"))
    return Call(
        OP,
        TARGET,
        check,
        names=tuple(operands.names),
        operands=tuple(operands.specs),
        results=tuple(results),
        attributes=tuple(operands.attributes),
        num_shared_heads=paged.num_shared_heads,
        head_dims=(*operands.head_dims, *[1] * len(results)),
        cuda_scratch_bytes=varlen_scratch.forward_bytes,
    )


def row_attributes(
    query: ArraySpec, key: ArraySpec, value: ArraySpec, *others: ArraySpec
) -> list[tuple[str, Scalar]]:
    """The attributes of a call in which rows of tokens are part of wider rows."""
    if all(array.strides is None for array in (query, key, value, *others)):
        return []
    sizes = (*query.shape[1:], key.shape[1], value.shape[2])
    names = ("row_heads", "row_head_size", "row_kv_heads", "row_value_head_size")
    return [(name, np.int64(size)) for name, size in zip(names, sizes, strict=True)]


def second_derivative_error() -> NotImplementedError:
    """For a derivative of the gradients."""
    return NotImplementedError(
        f"{OP}: it has no second derivative; got a call for the derivative of its gradients. "
        "Compute them outside of it, or stop it: jax.lax.stop_gradient, create_graph=False"
    )
