"""``varlen_attention`` for JAX, and its derivative."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_frontend import _call
from shared_ffi import varlen_attention as op
from shared_ffi import varlen_attention_backward as backward
from shared_ffi.xla.lowering import vary_alike

_Operands = dict[str, jax.Array]
_Options = tuple[tuple[str, Any], ...]


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
    prefix_seqs: jax.Array | None = None,
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
        max_query_len: a promise that no sequence is longer.
        prefix_seqs: ``[max_seqs]`` int32, the earlier sequence that each one continues, or -1: its
            tokens attend to those of that one, too, which may itself continue another. So answers
            share the tokens of their prompt. Positions count from the first token of all.

    Returns:
        ``[num_tokens, num_heads, value_head_size]``, dtype of ``query``. Rows of padding are zero.

        Its derivative, with respect to ``query``, ``key``, ``value``, ``sinks`` and
        ``alibi_slopes``, is one custom call as well, ``xla_gpu_varlen_attention_backward``. It
        computes the weights anew from the log-sum-exp, in float32: its memory is linear in the
        tokens. A sequence's gradients have the same bits in JAX and PyTorch, alone and in a batch,
        with any number of threads; those of sinks and slopes are sums over the batch in a fixed
        order. NaN or infinity in a sequence reaches the gradients of no other sequence, but for
        these sums.

        It works under JAX's transformations, in ``jax.export`` and on devices that share the heads;
        ``jax.vmap`` packs the calls into one, or loops where sinks or slopes differ, or have a
        gradient. There is no second derivative, and none in forward mode.

    Raises:
        ValueError, TypeError, jax.errors.JaxRuntimeError: as in ``paged_attention``.
        NotImplementedError: a second derivative is asked for.

    Reference:
        The backward pass of FlashAttention-2, Dao, arXiv:2307.08691.
    """
    arrays = _call.Arrays(op.OP, op.check)
    call = op.check(
        **arrays.read(query=query, key=key, value=value),
        **arrays.int32(query_start_loc=query_start_loc, num_seqs=num_seqs),
        **arrays.float32(sinks=sinks, alibi_slopes=alibi_slopes),
        **arrays.int32(bidirectional_ranges=bidirectional_ranges),
        **arrays.read(causal=causal),
        **arrays.int32(prefix_seqs=prefix_seqs),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        window_right=window_right,
        max_query_len=max_query_len,
    )
    operands = arrays.by_name()
    if operands["key"].shape[1] == 1:
        own = partial(_own_kv_heads, operands["query"])
        operands |= {name: own(operands[name]) for name in ("key", "value")}
    # Under jax.shard_map, operands vary alike before the derivative begins: JAX adds up the
    # gradients of those that devices share.
    varying = vary_alike([*operands.values()])
    return _attend(call.options, dict(zip(operands, varying, strict=True)))


def _own_kv_heads(query: jax.Array, rows: jax.Array) -> jax.Array:
    """K or V of the one kv head. Where devices share the query heads on a mesh with explicit axes,
    each gets a kv head of its own: JAX adds up their gradients."""
    sharding = jax.typeof(query).sharding
    if (axes := sharding.spec[1]) is None:
        return rows
    names = axes if isinstance(axes, tuple) else (axes,)
    num_devices = math.prod(sharding.mesh.shape[name] for name in names)
    shape = (rows.shape[0], num_devices, rows.shape[2])
    own = NamedSharding(sharding.mesh, PartitionSpec(None, axes, None))
    return jax.lax.broadcast_in_dim(rows[:, 0], shape, (0, 2), out_sharding=own)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, operands: _Operands) -> jax.Array:
    return _call.make(op.OP, op.check, operands, dict(options))[0]


def _attend_forward(options: _Options, operands: _Operands) -> Any:
    with_lse = dict(options) | {"return_lse": True}
    output, lse = _call.make(op.OP, op.check, operands, with_lse)
    return output, (operands, output, lse)


def _attend_backward(options: _Options, residuals: Any, dout: jax.Array) -> Any:
    operands, output, lse = residuals
    given = operands | {"output": output, "lse": lse, "dout": dout}
    found = _call.make(backward.OP, backward.check, given, dict(options))
    names = [name for name in op.DIFFERENTIABLE if name in operands]
    gradients = dict(zip(names, found, strict=True))
    return ({name: gradients.get(name) for name in operands},)


_attend.defvjp(_attend_forward, _attend_backward)
