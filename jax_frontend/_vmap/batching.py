"""The rule for ``jax.vmap``: the calls of an op become one call, or a loop over the mapped axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

MAX_INT32 = 2**31 - 1

Results = tuple[jax.Array, ...]


class Operand(NamedTuple):
    """An operand of the calls under ``vmap``."""

    array: jax.Array
    is_mapped: bool
    """Whether the first dimension of `array` is the mapped axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one call's operand."""
        return self.array.shape[1:] if self.is_mapped else self.array.shape

    def broadcast(self, size: int) -> jax.Array:
        """``[size, *shape]``: the operands of all calls."""
        if self.is_mapped:
            return self.array
        return jnp.broadcast_to(self.array[None], (size, *self.shape))


class BatchedCall(NamedTuple):
    """One call that does the work of all calls under ``vmap``."""

    arrays: dict[str, jax.Array]
    unbatch: Callable[[jax.Array], jax.Array]
    """Turns a result of this call into the results of all calls, ``[size, ...]``."""
    options: dict[str, Any]
    """The options that differ from those of the calls under ``vmap``."""


Batch = Callable[[int, Mapping[str, Operand], Mapping[str, Any]], BatchedCall | None]
"""How an op batches calls. Takes the size of the mapped axis, which is not 0, then operands and
options by name. Returns None if the op has no call that does the work of all of these."""


def elementwise(
    size: int, operands: Mapping[str, Operand], options: Mapping[str, Any]
) -> BatchedCall:
    """Batches calls of an op that takes arrays of any one shape: they get one more dimension."""
    arrays = {name: x.broadcast(size) for name, x in operands.items()}
    return BatchedCall(arrays, unbatch=lambda result: result, options={})


def with_vmap_rule(
    function: Callable[..., Results], batched: Callable[[int, Sequence[Operand]], Results | None]
) -> Callable[..., Results]:
    """Gives a function of arrays its rule for ``jax.vmap``.

    Args:
        function: makes one call.
        batched: makes all calls as one and returns the results, ``[size, ...]``; None: it cannot.
    """
    batchable = custom_vmap(function)
    batchable.def_vmap(partial(_vmap_rule, batchable, batched))
    return batchable


def _vmap_rule(
    function: Callable[..., Results],
    batched: Callable[[int, Sequence[Operand]], Results | None],
    size: int,
    is_mapped: Sequence[bool],
    *arrays: jax.Array,
) -> tuple[Results, tuple[bool, ...]]:
    operands = [*map(Operand, arrays, is_mapped)]
    results = batched(size, operands) if size > 0 else None
    if results is None:
        mapped = [x.array for x in operands if x.is_mapped]
        results = jax.lax.map(partial(_one_call, function, operands), mapped)
    return results, (True,) * len(results)


def _one_call(
    function: Callable[..., Results], operands: Sequence[Operand], mapped: Sequence[jax.Array]
) -> Results:
    """One step of the loop: `mapped` are this call's parts of the operands that are mapped."""
    parts = iter(mapped)
    return function(*[next(parts) if x.is_mapped else x.array for x in operands])


def flatten(arrays: jax.Array) -> jax.Array:
    """Merges the mapped axis with the dimension after it."""
    return jax.lax.collapse(arrays, 0, 2)


def numbers_in_pool(numbers: jax.Array, count: int) -> jax.Array:
    """Renumbers blocks or slots for one pool that holds the `count` blocks or slots of each call.

    No number points into another call's part of the pool: a negative number stays negative, and one
    that is past the end of its call's part becomes one past the end of the pool.
    """
    size, *rest = numbers.shape
    first = count * jnp.arange(size, dtype=numbers.dtype).reshape(size, *[1] * len(rest))
    inside = jnp.where(numbers < 0, numbers, numbers + first)
    return jnp.where(numbers < count, inside, size * count)
