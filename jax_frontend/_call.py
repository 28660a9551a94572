"""From JAX arrays to a checked call, and from the call to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jax_frontend import _sharding, _vmap
from shared_ffi.spec import ArraySpec, Call


def run(
    check: Callable[..., Call],
    operands: Sequence[Any],
    *attributes: Any,
    fold: _vmap.Fold | None = None,
    optional: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """The results of an op. Differentiating it raises: these are ops for inference.

    Args:
        check: the op's check in shared_ffi.
        operands: its array arguments, or what jnp.asarray makes arrays of.
        attributes: its other positional arguments.
        fold: what makes one call of those under jax.vmap. None: they are looped over.
        optional: its array arguments that may be None, in their order.
        options: its other keyword arguments.
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    given = {name: jnp.asarray(x) for name, x in (optional or {}).items() if x is not None}
    arguments = _Arguments(check, len(arrays), (*given,), attributes, (*options.items(),), fold)
    return _run(arguments, *arrays, *given.values())


@dataclass(frozen=True)
class _Arguments:
    """What a call is made of besides arrays."""

    check: Callable[..., Call]
    num_operands: int
    optional: tuple[str, ...]
    attributes: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    fold: _vmap.Fold | None

    def call_on(self, *arrays: jax.Array) -> Call:
        """The call on these arrays, or on a device's parts of them."""
        specs = [ArraySpec(array.shape, array.dtype.name) for array in arrays]
        operands, optional = self._split(specs)
        return self.check(*operands, *self.attributes, **optional, **dict(self.options))

    def folded(self, size: int, arrays: Sequence[_vmap.Operand]) -> _vmap.Folded | None:
        """What `size` calls on these arrays become, if anything."""
        if self.fold is None or size == 0:
            return None
        return self.fold(size, *self._split(arrays), dict(self.options))

    def _split(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The operands, and by their names those that may be None."""
        operands, rest = arrays[: self.num_operands], arrays[self.num_operands :]
        return operands, dict(zip(self.optional, rest, strict=True))


def _run(arguments: _Arguments, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return _function(arguments, arguments.call_on(*arrays))(*arrays)


@lru_cache(maxsize=4096)
def _function(arguments: _Arguments, call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    """Jitted, for those who call an op outside of a program; one object for equal calls, so that
    JAX finds what it has compiled."""

    @custom_vmap
    def batchable(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _sharding.shared_by_heads(call, arguments.call_on, *arrays)

    @batchable.def_vmap
    def _fold_or_loop(size: int, is_mapped: Sequence[bool], *arrays: jax.Array) -> Any:
        operands = [*map(_vmap.Operand, arrays, is_mapped)]
        if folded := arguments.folded(size, operands):
            optional = [folded.optional[name] for name in arguments.optional]
            options = dict(arguments.options) | dict(folded.options)
            of_all = _run(
                replace(arguments, options=(*options.items(),)), *folded.operands, *optional
            )
            results = tuple(map(folded.unfold, of_all))
        else:
            results = _vmap.loop(batchable, operands)
        return results, (True,) * len(results)

    @jax.custom_jvp
    def forward(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return batchable(*arrays)

    @forward.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{call.op}: inference only, it has no derivative; got a call under jax.grad, jax.jvp "
            "or jax.linearize. Wrap the operands in jax.lax.stop_gradient"
        )

    return jax.jit(forward, inline=True)
