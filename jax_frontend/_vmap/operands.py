"""Operands and calls under ``jax.vmap``: what the rules of the ops have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MAX_INT32 = 2**31 - 1


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
    unbatch: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]
    """Turns the results of this call into those of all calls, each ``[size, ...]``."""
    options: dict[str, Any]
    """The options that differ from those of the calls under ``vmap``."""


BatchingRule = Callable[[int, Mapping[str, Operand], Mapping[str, Any]], BatchedCall | None]
"""How an op batches calls. Takes the size of the mapped axis, which is not 0, then by name the
operands, and the options that differ from their defaults. Returns None if the op has no call that
does the work of all of these."""


def exceeds(size: int, limit: int) -> bool:
    """Whether a size is larger than a limit. A size that is a symbol is taken for a small one."""
    return isinstance(size, int) and size > limit


def elementwise(
    size: int, operands: Mapping[str, Operand], options: Mapping[str, Any]
) -> BatchedCall:
    """Batches calls of an op that takes arrays of any one shape: they get one more dimension."""
    arrays = {name: x.broadcast(size) for name, x in operands.items()}
    return BatchedCall(arrays, unbatch=lambda results: results, options={})


def flatten(arrays: jax.Array) -> jax.Array:
    """Merges the mapped axis with the dimension after it."""
    return jax.lax.collapse(arrays, 0, 2)


def take(
    array: jax.Array, places: tuple[jax.Array, ...], fill_value: float | None = None
) -> jax.Array:
    """The elements of an array at these places of its first dimensions, which are not sharded; the
    other dimensions stay sharded as they are. A place that is past the end is the last one, or has
    the value to fill."""
    sharding = jax.typeof(array).sharding
    spec = jax.sharding.PartitionSpec(*[None] * places[0].ndim, *sharding.spec[len(places) :])
    is_sharded = any(axes is not None for axes in sharding.spec)
    out_sharding = jax.sharding.NamedSharding(sharding.mesh, spec) if is_sharded else None
    mode = "clip" if fill_value is None else "fill"
    return array.at[places].get(mode=mode, fill_value=fill_value, out_sharding=out_sharding)


def numbers_in_pool(numbers: jax.Array, count: int) -> jax.Array:
    """Renumbers blocks or slots for one pool that holds the `count` blocks or slots of each call.

    No number points into another call's part of the pool: a negative number stays negative, and one
    that is past the end of its call's part becomes one past the end of the pool.
    """
    size, *rest = numbers.shape
    first = count * jnp.arange(size, dtype=numbers.dtype).reshape(size, *[1] * len(rest))
    inside = jnp.where(numbers < 0, numbers, numbers + first)
    return jnp.where(numbers < count, inside, size * count)
