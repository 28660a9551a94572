"""From a checked call to XLA: the one place that calls ``jax.ffi`` and that produces HLO."""

from __future__ import annotations

from functools import cache, partial

import jax
import numpy as np

from shared_ffi import runtimes
from shared_ffi.spec import ArraySpec, Call


def ffi_call(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The custom call on JAX arrays or tracers; batched by a loop under ``vmap``."""
    runtimes.register()
    if call.cuda_scratch_bytes is None:
        return _ffi_call_on("cpu", call, *operands)  # the same everywhere
    return jax.lax.platform_dependent(
        *operands,
        cpu=partial(_ffi_call_on, "cpu", call),
        cuda=partial(_ffi_call_on, "cuda", call),
    )


def _ffi_call_on(platform: str, call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    results = jax.ffi.ffi_call(
        call.target,
        [_struct(spec) for spec in call.results_on(platform)],
        vmap_method="sequential",
        input_output_aliases=dict(call.aliases),
    )(*operands, **dict(call.attributes))
    return tuple(results[: len(call.results)])


@cache
def hlo_module(call: Call, platform: str) -> bytes:
    """A serialized HloModuleProto whose entry is just this call, for a platform ("cpu", "cuda").

    No backend of that platform is needed, nor created: JAX only writes the program. 64-bit types
    are on while it does, whatever the user's setting, so that an int64 operand stays one.
    """

    def entry(*operands: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        results = ffi_call(call, *operands)
        return results[0] if len(results) == 1 else results

    with jax.enable_x64(True):
        traced = jax.jit(entry, keep_unused=True).trace(*map(_struct, call.operands))
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo")
    serialized: bytes = module.as_serialized_hlo_module_proto()
    return serialized


def _struct(spec: ArraySpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype))
