"""The rule for ``jax.vmap``: the calls of an op become one call, or a loop over the mapped axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from jax_frontend import _call
from jax_frontend._vmap import kv_cache_update, paged_attention, varlen_attention
from jax_frontend._vmap.operands import BatchingRule, Operand, elementwise
from shared_ffi.spec import Call, value_error
from shared_ffi.xla import lowering

RULES: dict[str, BatchingRule] = {
    "simple_add": elementwise,
    "kv_cache_update": kv_cache_update.batch,
    "paged_attention": paged_attention.batch,
    "varlen_attention": varlen_attention.batch,
    "varlen_attention_backward": varlen_attention.batch,
}
"""How each op batches calls; an op that is not here loops over them."""


def _batch(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], *, call: Call
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    """JAX's rule: the results of all calls, and their mapped axes."""
    operands = [
        Operand(x, False) if dim is None else Operand(jnp.moveaxis(x, dim, 0), True)
        for x, dim in zip(arrays, dims, strict=True)
    ]
    size = next(x.array.shape[0] for x in operands if x.is_mapped)
    for number, operand in enumerate(operands):
        _check_mapped_axis(call, number, operand)
    results = _as_one_call(call, size, operands)
    if results is None:
        mapped = [x.array for x in operands if x.is_mapped]
        results = jax.lax.map(partial(_one_call, call, operands), mapped)
    return results, [0] * len(results)


def _check_mapped_axis(call: Call, number: int, operand: Operand) -> None:
    axes = jax.typeof(operand.array).sharding.spec[:1]
    if operand.is_mapped and axes != (None,):
        rule = "be replicated along the axis that jax.vmap maps over"
        remedy, got = "Use jax.shard_map there", f"mesh axis {axes[0]!r}"
        raise value_error(call.op, call.names[number], rule, got, remedy)


def _as_one_call(
    call: Call, size: int, operands: Sequence[Operand]
) -> tuple[jax.Array, ...] | None:
    """Makes all calls as one; returns None if the op cannot."""
    if call.op not in RULES or size == 0:
        return None
    by_name = dict(zip(call.names, operands, strict=True))
    options = dict(call.options)
    batched = RULES[call.op](size, by_name, options)
    if batched is None:
        return None
    results = _call.make(call.op, call.check, batched.arrays, options | batched.options)
    return tuple(batched.unbatch(results))


def _one_call(
    call: Call, operands: Sequence[Operand], mapped: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """One step of the loop: `mapped` are this call's parts of the operands that are mapped."""
    parts = iter(mapped)
    return lowering.make(call, *[next(parts) if x.is_mapped else x.array for x in operands])


batching.primitive_batchers[lowering.call_p] = _batch
