"""How ``jax.vmap`` makes one call of many: the mapped axis goes into dimensions that a call has.

Each op says how, by a function that ``_call.run`` takes as `fold`. What cannot be folded is looped
over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MAX_INT32 = 2**31 - 1


class Operand(NamedTuple):
    """An operand of a call under ``vmap``."""

    array: jax.Array
    is_mapped: bool
    """Its first dimension is the mapped axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one call's operand."""
        return self.array.shape[1:] if self.is_mapped else self.array.shape

    def of_each(self, size: int) -> jax.Array:
        """``[size, *shape]``: each call's operand."""
        if self.is_mapped:
            return self.array
        return jnp.broadcast_to(self.array[None], (size, *self.shape))


class Folded(NamedTuple):
    """The one call that many become."""

    arrays: Mapping[str, jax.Array]
    unfold: Callable[[jax.Array], jax.Array]
    """Of one of its results: that of each call, ``[size, ...]``."""
    options: Mapping[str, Any] = MappingProxyType({})
    """What is not as in each of the many."""


Fold = Callable[[int, Mapping[str, Operand], Mapping[str, Any]], "Folded | None"]
"""Takes the size of the mapped axis, which is not 0, and a call's operands and options by name.
Returns None if these are not folded."""


def elementwise(size: int, operands: Mapping[str, Operand], options: Mapping[str, Any]) -> Folded:
    """Of an op that takes arrays of any rank, all of one shape: one dimension more."""
    return Folded(
        {name: x.of_each(size) for name, x in operands.items()},
        lambda result: result,
    )


def joined(of_each: jax.Array) -> jax.Array:
    """The mapped axis and the one after it as one."""
    return jax.lax.collapse(of_each, 0, 2)


def renumbered(of_each: jax.Array, count: int) -> jax.Array:
    """Numbers of blocks or slots, of which each call has `count`, for a cache that has all calls'.

    No call's numbers point to what another call has: the negative ones stay negative, and those
    past the end are past the end of all.
    """
    size, *rest = of_each.shape
    first = count * jnp.arange(size, dtype=of_each.dtype).reshape(size, *[1] * len(rest))
    inside = jnp.where(of_each < 0, of_each, of_each + first)
    return jnp.where(of_each < count, inside, size * count)


def loop(
    function: Callable[..., tuple[jax.Array, ...]], operands: Sequence[Operand]
) -> tuple[jax.Array, ...]:
    """The results of each call, made one after the other."""

    def call(mapped: list[jax.Array]) -> tuple[jax.Array, ...]:
        next_mapped = iter(mapped)
        return function(*[next(next_mapped) if x.is_mapped else x.array for x in operands])

    return jax.lax.map(call, [x.array for x in operands if x.is_mapped])
