"""From JAX arrays to a checked call, and from the call to its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shared_ffi import lowering
from shared_ffi.spec import ArraySpec, Call


def run(check: Callable[..., Call], operands: Sequence[Any], *attributes: Any) -> jax.Array:
    """The result of an op. Differentiating it raises: these are ops for inference.

    Args:
        check: the op's check in shared_ffi.
        operands: its array arguments, or what jnp.asarray makes arrays of.
        attributes: its other arguments.
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    specs = [ArraySpec(array.shape, array.dtype.name) for array in arrays]
    call = check(*specs, *attributes)

    @jax.custom_jvp
    def forward(*arrays: jax.Array) -> jax.Array:
        return lowering.ffi_call(call, *arrays)[0]

    @forward.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{call.op}: inference only, it has no derivative; got a call under jax.grad, jax.jvp "
            "or jax.linearize. Wrap the operands in jax.lax.stop_gradient"
        )

    result: jax.Array = forward(*arrays)
    return result
