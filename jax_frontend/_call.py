"""From JAX arrays to a checked call, and from the call to its results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shared_ffi import lowering
from shared_ffi.spec import ArraySpec, Call


def spec_of(array: jax.Array) -> ArraySpec:
    return ArraySpec(array.shape, array.dtype.name)


def as_arrays(*arrays: Any) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, arrays))


def run(call: Call, *operands: jax.Array) -> jax.Array:
    """The call's result. Differentiating it raises: these are ops for inference."""

    @jax.custom_jvp
    def forward(*operands: jax.Array) -> jax.Array:
        return lowering.ffi_call(call, *operands)[0]

    @forward.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{call.op}: inference only, it has no derivative; got a call under jax.grad, jax.jvp "
            "or jax.linearize. Wrap the operands in jax.lax.stop_gradient"
        )

    result: jax.Array = forward(*operands)
    return result
