"""From JAX arrays to a checked call, and from the call to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_frontend import _differentiation, _sharding, _vmap
from shared_ffi.spec import ArraySpec, Call


def run(
    check: Callable[..., Call],
    arrays: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    fold: _vmap.Fold | None = None,
) -> tuple[jax.Array, ...]:
    """The results of an op. Differentiating it raises: these are ops for inference.

    Args:
        check: the op's check in shared_ffi, which takes all arguments by name.
        arrays: its array arguments by name, in the order of the operands; None: not given.
        options: its other arguments by name.
        fold: makes one call of many under jax.vmap. None: the calls are looped over.
    """
    given = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
    arguments = Arguments(check, (*given,), (*(options or {}).items(),), fold)
    return bind(arguments, *given.values())


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, without the arrays themselves. Hashable."""

    check: Callable[..., Call]
    array_names: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    fold: _vmap.Fold | None

    def call_on(self, *arrays: jax.Array) -> Call:
        """The checked call on these arrays, or on a device's parts of them."""
        specs = [ArraySpec(array.shape, array.dtype.name) for array in arrays]
        return self.check(**dict(zip(self.array_names, specs, strict=True)), **dict(self.options))


def bind(arguments: Arguments, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Checks a call and makes it."""
    return _jitted(arguments, arguments.call_on(*arrays))(*arrays)


@lru_cache(maxsize=4096)
def _jitted(arguments: Arguments, call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    """Equal calls get the same function, so that JAX finds what it has compiled."""
    batchable = custom_vmap(partial(_sharding.shared_by_heads, call, arguments.call_on))
    batchable.def_vmap(partial(_batch, arguments, batchable))
    return jax.jit(_differentiation.refused(call.op, batchable), inline=True)


def _batch(
    arguments: Arguments,
    function: Callable[..., tuple[jax.Array, ...]],
    size: int,
    is_mapped: list[bool],
    *arrays: jax.Array,
) -> Any:
    """The rule for ``jax.vmap``: one folded call if the op allows it, otherwise a loop."""
    operands = [*map(_vmap.Operand, arrays, is_mapped)]
    options = dict(arguments.options)
    folded = None
    if arguments.fold is not None and size > 0:
        folded = arguments.fold(
            size, dict(zip(arguments.array_names, operands, strict=True)), options
        )
    if folded is None:
        results = _vmap.loop(function, operands)
    else:
        folded_arrays = {name: folded.arrays[name] for name in arguments.array_names}
        of_all = run(arguments.check, folded_arrays, options | {**folded.options}, arguments.fold)
        results = tuple(map(folded.unfold, of_all))
    return results, (True,) * len(results)
