"""The check of ``varlen_attention``, which is no custom call of its own: each frontend calls
``paged_attention`` on K and V seen as a cache with blocks of one position."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared_ffi import paged_attention, token_rows
from shared_ffi.spec import ArraySpec, dtype_error, has_shape, holds, is_symbol, shape_error

OP = "varlen_attention"
KV_LAYOUT = "nhd"
CHUNK = 128
"""The query tokens, and the keys, that a derivative takes at a time. 64 to 512 were tried on a CPU:
this was the fastest, in both frontends."""


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
    max_query_len: int | None = None,
    **others: Any,
) -> int:
    """Checks a call, whose other arguments are those of ``paged_attention``.

    Returns:
        the most tokens of a sequence, as far as the call tells: the width of the block table.

    Raises:
        ValueError: a shape or value is wrong.
        TypeError: a dtype or type is wrong.
    """
    token_rows.check(OP, "query", query)
    token_rows.check(OP, "key", key, "num_kv_heads")
    num_tokens, _, head_size = query.shape
    if not has_shape(key, (num_tokens, *key.shape[1:2], head_size)) or key.shape[1] == 0:
        rule = f"[num_tokens={num_tokens}, num_kv_heads, head_size={head_size}]"
        raise shape_error(OP, "key", rule, key.shape)
    num_kv_heads = key.shape[1]
    if not (
        has_shape(value, (num_tokens, num_kv_heads, *value.shape[2:3]))
        and holds(value.shape[2] >= 1)
        and holds(value.shape[2] <= head_size)
    ):
        rule = f"[num_tokens={num_tokens}, num_kv_heads={num_kv_heads}, 1 to {head_size}]"
        raise shape_error(OP, "value", rule, value.shape)
    for argument, spec in (("key", key), ("value", value)):
        if spec.dtype != query.dtype:
            raise dtype_error(OP, argument, f"query's dtype {query.dtype}", spec.dtype)
    if len(query_start_loc.shape) != 1 or not holds(query_start_loc.shape[0] >= 1):
        remedy = "It has the first token of each sequence, then the end"
        raise shape_error(OP, "query_start_loc", "[max_seqs + 1]", query_start_loc.shape, remedy)
    if query_start_loc.dtype != "int32":
        raise dtype_error(OP, "query_start_loc", "dtype int32", query_start_loc.dtype)
    width, max_seqs = num_tokens, query_start_loc.shape[0] - 1
    if isinstance(max_query_len, int | np.integer) and not is_symbol(num_tokens):
        width = min(int(max_query_len), num_tokens)
    paged_attention.check(
        query,
        key,
        ArraySpec((max_seqs,), query_start_loc.dtype),
        ArraySpec((max_seqs, width), query_start_loc.dtype),
        query_start_loc,
        num_seqs,
        scale,
        sliding_window,
        soft_cap,
        value_cache=value,
        kv_layout=KV_LAYOUT,
        max_query_len=max_query_len,
        op=OP,
        **others,
    )
    return width


def second_derivative_error() -> NotImplementedError:
    """For a derivative of the gradients."""
    return NotImplementedError(
        f"{OP}: it has no second derivative; got a call for the derivative of its gradients. "
        "Compute them outside of it, or stop it: jax.lax.stop_gradient, create_graph=False"
    )
