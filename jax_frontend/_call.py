"""From JAX arrays to a checked call, and from the call to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shared_ffi import lowering
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
    specs = {name: _spec(array) for name, array in given.items()}
    call = check(*map(_spec, arrays), *attributes, **specs, **options)

    @jax.custom_jvp
    def forward(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return lowering.ffi_call(call, *arrays)

    @forward.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{call.op}: inference only, it has no derivative; got a call under jax.grad, jax.jvp "
            "or jax.linearize. Wrap the operands in jax.lax.stop_gradient"
        )

    results: tuple[jax.Array, ...] = forward(*arrays, *given.values())
    return results


def _spec(array: jax.Array) -> ArraySpec:
    return ArraySpec(array.shape, array.dtype.name)
