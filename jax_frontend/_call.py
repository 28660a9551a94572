"""From JAX arrays to a checked call, and from the call to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jax_frontend import _sharding
from shared_ffi.spec import ArraySpec, Call


def run(
    check: Callable[..., Call],
    operands: Sequence[Any],
    *attributes: Any,
    optional: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """The results of an op. Differentiating it raises: these are ops for inference.

    Args:
        check: the op's check in shared_ffi.
        operands: its array arguments, or what jnp.asarray makes arrays of.
        attributes: its other positional arguments.
        optional: its array arguments that may be None, in their order.
        options: its other keyword arguments.
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    given = {name: jnp.asarray(x) for name, x in (optional or {}).items() if x is not None}
    arguments = _Arguments(check, len(arrays), (*given,), attributes, (*options.items(),))
    arrays += given.values()
    return _function(arguments, arguments.call_on(*arrays))(*arrays)


@dataclass(frozen=True)
class _Arguments:
    """What a call is made of besides arrays."""

    check: Callable[..., Call]
    num_operands: int
    optional: tuple[str, ...]
    attributes: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    def call_on(self, *arrays: jax.Array) -> Call:
        """The call on these arrays, or on a device's parts of them."""
        specs = [ArraySpec(array.shape, array.dtype.name) for array in arrays]
        operands, rest = specs[: self.num_operands], specs[self.num_operands :]
        optional = dict(zip(self.optional, rest, strict=True))
        return self.check(*operands, *self.attributes, **optional, **dict(self.options))


@lru_cache(maxsize=4096)
def _function(arguments: _Arguments, call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    """Jitted, for those who call an op outside of a program; one object for equal calls, so that
    JAX finds what it has compiled."""

    @jax.custom_jvp
    def forward(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _sharding.shared_by_heads(call, arguments.call_on, *arrays)

    @forward.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{call.op}: inference only, it has no derivative; got a call under jax.grad, jax.jvp "
            "or jax.linearize. Wrap the operands in jax.lax.stop_gradient"
        )

    return jax.jit(forward, inline=True)
