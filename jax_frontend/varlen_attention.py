"""``varlen_attention`` for JAX, and its derivative."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_frontend import _call
from jax_frontend.paged_attention import paged_attention
from shared_ffi import varlen_attention as op

_Operands = Mapping[str, Any]  # arrays by name; None: there is none


class _Options(NamedTuple):
    """What of a call is no array."""

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    causal: bool  # where no array says it
    window_right: int | None
    max_query_len: int | None
    width: int  # of a sequence, at most


def varlen_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    bidirectional_ranges: jax.Array | None = None,
    causal: bool | jax.Array = True,
    window_right: int | None = None,
    max_query_len: int | None = None,
) -> jax.Array:
    """Attention of packed sequences to themselves, with a derivative, for training.

    Keys and values are arrays beside the query, one row for each token, with no cache. The output
    has the bits that ``paged_attention`` gives for the same tokens over a cache with pages of any
    size: what an engine sampled with one and a trainer computes with the other is equal. The
    arguments mean what they mean there.

    Sequence s has the tokens ``query_start_loc[s]`` up to ``query_start_loc[s + 1]``. Its token i
    stands at position ``p = i``, and attends to the positions ``j <= p`` of its sequence.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, float32, float16 or bfloat16: the tokens of
            all sequences, one sequence after the other, then padding.
        key: ``[num_tokens, num_kv_heads, head_size]``, dtype of ``query``.
        value: ``[num_tokens, num_kv_heads, value_head_size]``, dtype of ``query``; its head size
            may be smaller, and is that of the output.
        query_start_loc: ``[max_seqs + 1]`` int32, non-decreasing up to entry ``num_seqs``.
        num_seqs: ``[]`` or ``[1]`` int32, from 0 to max_seqs.
        scale: factor of ``q . k``.
        sliding_window: how many positions a token attends to, itself included. None: all of them.
        soft_cap: c > 0 turns a logit into ``c * tanh(logit / c)``. None: off.
        sinks: ``[num_heads]`` float32, one more logit in the softmax of each head.
        alibi_slopes: ``[num_heads]`` float32.
        bidirectional_ranges: ``[num_tokens, 2]`` int32, positions that a token also attends to.
        causal: False lets a token attend to later positions; ``[max_seqs]``: for each sequence.
        window_right: how many of them, where attention is not causal. None: all of them.
        max_query_len: a promise that no sequence is longer. The call has an int32 table of
            ``max_seqs`` rows with so many entries, without the promise with ``num_tokens``.

    Returns:
        ``[num_tokens, num_heads, value_head_size]``, dtype of ``query``. Rows of padding are zero.

        Its derivative, with respect to ``query``, ``key``, ``value``, ``sinks`` and
        ``alibi_slopes``, works under ``jax.jit``, ``jax.vmap``, ``jax.checkpoint``, ``lax.scan``
        and, on automatic meshes and in ``jax.shard_map``, with devices that share the heads. It
        computes the weights anew from the log-sum-exp, 128 x 128 tokens at a time, in float32: its
        memory is linear in the tokens. Two runs give the same gradients. NaN or infinity in a
        sequence reaches the gradients of no other sequence, but for sums over all of them. There
        is no second derivative, and none in forward mode. Under ``jax.vmap`` it is a loop.

    Raises:
        ValueError, TypeError, jax.errors.JaxRuntimeError: as in ``paged_attention``, some in its
            name.
        NotImplementedError: a second derivative is asked for.

    Reference:
        The backward pass of FlashAttention-2, Dao, arXiv:2307.08691.
    """
    given = dict(locals())
    arrays = _call.Arrays(op.OP)
    read = arrays.read(
        varlen_attention,
        given,
        int32=("query_start_loc", "num_seqs", "bidirectional_ranges"),
        float32=("sinks", "alibi_slopes"),
    )
    width = op.check(**read)
    operands = arrays.by_name()
    is_causal = "causal" not in operands and bool(causal)
    numbers = (scale, sliding_window, soft_cap, is_causal, window_right, max_query_len)
    return _attend(_Options(*numbers, width), operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, operands: _Operands) -> jax.Array:
    output: jax.Array = _forward(options, operands, return_lse=False)
    return output


def _forward(options: _Options, operands: _Operands, *, return_lse: Any) -> Any:
    """Key and value are a cache with blocks of one position, whose table counts the tokens."""
    others = dict(operands)
    query, key, value, starts, num_seqs = (
        others.pop(x) for x in ("query", "key", "value", "query_start_loc", "num_seqs")
    )
    if "causal" not in others:
        others["causal"] = options.causal
    return paged_attention(
        query,
        key,
        jnp.diff(starts),
        starts[:-1, None] + jnp.arange(options.width, dtype=jnp.int32),
        starts,
        num_seqs,
        options.scale,
        options.sliding_window,
        options.soft_cap,
        value_cache=value,
        kv_layout=op.KV_LAYOUT,
        window_right=options.window_right,
        max_query_len=options.max_query_len,
        return_lse=return_lse,
        **others,
    )


def _attend_forward(options: _Options, operands: _Operands) -> Any:
    operands = _once(operands)
    output, lse = _forward(options, operands, return_lse=True)
    return output, (operands, output, lse)


def _attend_backward(options: _Options, residuals: Any, grad: jax.Array) -> Any:
    operands, output, lse = residuals
    gradients = _gradients(options)(*_once((operands, output, lse, grad)))
    return ({name: gradients.get(name) for name in operands},)


_attend.defvjp(_attend_forward, _attend_backward)


@jax.custom_jvp
def _once(arrays: Any) -> Any:
    """The same arrays, which refuse to be differentiated."""
    return arrays


@_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise op.second_derivative_error()


@lru_cache(maxsize=4096)
def _gradients(options: _Options) -> Any:
    """The function that computes gradients. Equal options get the same one, which JAX has compiled.
    Under ``jax.vmap`` a loop whose length differs would run on all of the memory: it runs for one
    call after the other."""
    return jax.jit(jax.custom_batching.sequential_vmap(partial(_compute_gradients, options)))


def _compute_gradients(
    options: _Options, operands: _Operands, output: jax.Array, lse: jax.Array, grad: jax.Array
) -> dict[str, jax.Array]:
    """A loop over the sequences, in it one over chunks of their queries, in it one over chunks of
    the keys that these attend to. Chunks count from the sequence's start and have one size, so that
    a sequence's gradients depend on itself alone."""
    query, key, value = (operands[name] for name in ("query", "key", "value"))
    starts, (slopes, sinks, ranges, causal_seqs) = (
        operands["query_start_loc"],
        map(operands.get, ("alibi_slopes", "sinks", "bidirectional_ranges", "causal")),
    )
    (num_tokens, num_heads, head_size), num_kv_heads = query.shape, key.shape[1]
    num_seqs = operands["num_seqs"].reshape(())
    numbers = jnp.arange(op.CHUNK, dtype=jnp.int32)
    wide = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    if slopes is not None:
        slopes = jnp.clip(slopes, -(2.0**95), 2.0**95).reshape(num_kv_heads, 1, -1, 1)

    tokens = jnp.arange(num_tokens)
    is_real = ((tokens >= starts[0]) & (tokens < starts[num_seqs]))[:, None]
    delta = jnp.where(is_real, (grad.astype(jnp.float32) * output).sum(-1), 0)

    def padded(array: jax.Array) -> jax.Array:
        """A slice of a chunk may end past the last token."""
        return jnp.pad(array, [(0, op.CHUNK), *[(0, 0)] * (array.ndim - 1)])

    stored = {
        "query": query,
        "key": key,
        "value": value,
        "grad": grad,
        "lse": lse[..., None],
        "delta": delta[..., None],
        "ranges": jnp.zeros((num_tokens, 2), jnp.int32) if ranges is None else ranges,
    }
    stored = {name: padded(array) for name, array in stored.items()}

    def chunk_of(name: str, first: Any, count: Any) -> jax.Array:
        """``[num_kv_heads, CHUNK, rows of a kv head, n]`` float32, 0 past the sequence's end."""
        part = lax.dynamic_slice_in_dim(stored[name], first, op.CHUNK).astype(jnp.float32)
        part = jnp.where(numbers[:, None, None] < count, part, 0)
        return part.reshape(op.CHUNK, num_kv_heads, -1, part.shape[-1]).swapaxes(0, 1)

    def add_sequence(s: Any, sums: Any) -> Any:
        start = starts[s]
        length = starts[s + 1] - start
        right = length if options.window_right is None else min(options.window_right, num_tokens)
        if causal_seqs is not None:
            right = jnp.where(causal_seqs[s] != 0, 0, right)
        elif options.causal:
            right = 0
        window = num_tokens if options.sliding_window is None else options.sliding_window
        window = min(window, num_tokens)

        def add_queries(n: Any, sums: Any) -> Any:
            i = n * op.CHUNK
            chunk = partial(chunk_of, first=start + i, count=length - i)
            q, do, row_lse, row_delta = map(chunk, ("query", "grad", "lse", "delta"))
            q = q * options.scale
            position = (i + numbers)[:, None]
            is_row = position < length
            begin = jnp.maximum(position - window + 1, 0)
            end = jnp.minimum(position + 1 + right, length)
            more = lax.dynamic_slice_in_dim(stored["ranges"], start + i, op.CHUNK)
            more_begin = jnp.maximum(more[:, :1], 0)
            more_end = jnp.where(is_row, jnp.minimum(more[:, 1:], length), 0)
            has_more = more_begin < more_end
            first = jnp.minimum(begin, jnp.where(has_more, more_begin, begin)).min()
            last = jnp.maximum(jnp.where(is_row, end, 0), jnp.where(has_more, more_end, 0)).max()

            def add_keys(m: Any, sums: Any) -> Any:
                dq, dk, dv, dslopes = sums
                j = first + m * op.CHUNK
                k, v = (chunk_of(x, start + j, length - j)[:, :, 0] for x in ("key", "value"))
                positions = j + numbers
                attends = (positions >= begin) & (positions < end)
                attends |= (positions >= more_begin) & (positions < more_end)
                attends = (attends & is_row)[:, None]
                logits = wide("hqgd,hkd->hqgk", q, k)
                if options.soft_cap is not None:
                    tanh = jnp.tanh(logits / options.soft_cap)
                    logits = options.soft_cap * tanh
                if slopes is not None:
                    distance = jnp.abs(position - positions).astype(jnp.float32)[:, None]
                    logits = logits - slopes * distance
                weights = jnp.where(attends, jnp.exp(logits - row_lse), 0)
                dweights = wide("hqgd,hkd->hqgk", do, v)
                dlogits = weights * (dweights - row_delta)
                if slopes is not None:
                    dslopes = dslopes - (dlogits * distance).sum((1, 3)).reshape(-1)
                if options.soft_cap is not None:
                    dlogits = dlogits * (1 - tanh * tanh)
                dq = dq + wide("hqgk,hkd->hqgd", dlogits, k)
                # NaN must not reach the rows of the next sequence.
                is_key = (positions < length)[:, None, None]
                more_dk = jnp.where(is_key, wide("hqgk,hqgd->khd", dlogits, q), 0)
                more_dv = jnp.where(is_key, wide("hqgk,hqgd->khd", weights, do), 0)
                dk, dv = (_add_rows(*x, start + j) for x in ((dk, more_dk), (dv, more_dv)))
                return dq, dk, dv, dslopes

            dqs, dk, dv, dslopes = sums
            count = (last - first + op.CHUNK - 1) // op.CHUNK
            dq, *others = lax.fori_loop(0, count, add_keys, (jnp.zeros_like(q), dk, dv, dslopes))
            dq = dq.swapaxes(0, 1).reshape(op.CHUNK, num_heads, head_size) * options.scale
            dq = jnp.where(is_row[..., None], dq, 0)
            return _add_rows(dqs, dq.astype(query.dtype), start + i), *others

        count = (length + op.CHUNK - 1) // op.CHUNK
        return lax.fori_loop(0, count, add_queries, sums)

    zeros = [jnp.zeros_like(stored["query"])]
    zeros += [jnp.zeros_like(stored[name], jnp.float32) for name in ("key", "value")]
    zeros.append(jnp.zeros_like(stored["lse"][0, :, 0]))
    sums = lax.fori_loop(0, num_seqs, add_sequence, (*zeros,))
    gradients = {
        name: total[:num_tokens].astype(query.dtype)
        for name, total in zip(("query", "key", "value"), sums, strict=False)
    }
    if slopes is not None:
        gradients["alibi_slopes"] = sums[3]
    if sinks is not None:
        # A row that attends to nothing but the sink has an output of 0, and a delta of 0.
        shares = jnp.where(delta == 0, 0, jnp.exp(sinks - lse))
        gradients["sinks"] = -(shares * delta).sum(0)
    return gradients


def _add_rows(total: jax.Array, part: jax.Array, first: Any) -> jax.Array:
    """Adds the rows of a chunk, from a row on."""
    own = lax.dynamic_slice_in_dim(total, first, op.CHUNK)
    return lax.dynamic_update_slice_in_dim(total, own + part, first, 0)
