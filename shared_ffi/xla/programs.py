"""XLA programs for other frameworks than JAX, which JAX writes and compiles for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from shared_ffi.spec import ArraySpec, Call
from shared_ffi.xla import runtimes
from shared_ffi.xla.lowering import is_for_jax, make


def hlo_module(
    call: Call, platform: str, on_device: Call | None = None, shardings: tuple[str, ...] = ()
) -> bytes:
    """Returns a serialized HloModuleProto whose entry is only this call, for a platform ("cpu",
    "cuda").

    JAX only writes the program, so it needs no backend of that platform and creates none. 64-bit
    types are enabled meanwhile, whatever the user's setting, so that an int64 operand keeps its
    type.

    Args:
        on_device: the call that each of several devices makes on its parts; None: one device.
        shardings: of the operands, then of the results, from shared_ffi.sharding; with on_device.
    """

    def entry(*operands: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        if on_device is None:
            results = make(call, *operands)
        else:
            results = _on_parts(call, on_device, shardings, operands)
        return results[0] if len(results) == 1 else results

    token = is_for_jax.set(False)
    try:
        with jax.enable_x64(True):
            traced = jax.jit(entry, keep_unused=True).trace(*map(_struct, call.operands))
            module = traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo")
    finally:
        is_for_jax.reset(token)
    serialized: bytes = module.as_serialized_hlo_module_proto()
    return serialized


def _on_parts(
    call: Call, on_device: Call, shardings: tuple[str, ...], operands: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Makes the call on each device's parts, between the annotations that keep XLA's SPMD
    partitioner from partitioning it again."""

    def annotated(array: jax.Array, before: str, target: str, after: str, spec: ArraySpec) -> Any:
        marked = _annotation.bind(array, target="Sharding", sharding=before, shape=array.shape)
        return _annotation.bind(marked, target=target, sharding=after, shape=spec.shape)

    count, manual = len(operands), "{manual}"
    parts = [
        annotated(array, sharding, "SPMDFullToShardShape", manual, spec)
        for array, sharding, spec in zip(operands, shardings, on_device.operands, strict=False)
    ]
    return tuple(
        annotated(part, manual, "SPMDShardToFullShape", sharding, spec)
        for part, sharding, spec in zip(
            make(on_device, *parts), shardings[count:], call.results, strict=True
        )
    )


_annotation = Primitive("spmd_annotation")


def _annotated(array: Any, *, shape: tuple[int, ...], **_: str) -> Any:
    return jax.core.ShapedArray(shape, array.dtype)


def _lower_annotation(
    _: Any, array: ir.Value, *, target: str, sharding: str, shape: tuple[int, ...]
) -> Any:
    result_type = ir.RankedTensorType.get(shape, ir.RankedTensorType(array.type).element_type)
    annotation = stablehlo.CustomCallOp([result_type], [array], target)
    annotation.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
    return annotation.results


_annotation.def_abstract_eval(_annotated)
mlir.register_lowering(_annotation, _lower_annotation)


def _struct(spec: ArraySpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype))


def compile_stablehlo(
    module: bytes, operands: Sequence[ArraySpec], results: Sequence[ArraySpec], device: Any
) -> Callable[..., list[jax.Array]]:
    """Compiles a program of another framework for a device; the result maps arrays to arrays.

    Args:
        module: a portable StableHLO artifact, whose ``main`` has these operands and results.
        device: a ``jax.Device``, a name whose type the type checker sometimes fails to find.
    """
    runtimes.register()
    structs = [jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype)) for spec in results]

    def entry(*arrays: jax.Array) -> list[jax.Array]:
        return _program.bind(*arrays, module=module, results=tuple(structs))

    sharding = jax.sharding.SingleDeviceSharding(device)
    with jax.enable_x64(True):
        arguments = [
            jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=sharding)
            for spec in operands
        ]
        return jax.jit(entry, keep_unused=True).lower(*arguments).compile()


_program = Primitive("stablehlo_program")
_program.multiple_results = True


def _program_results(*_: Any, module: bytes, results: Sequence[jax.ShapeDtypeStruct]) -> Any:
    return [jax.core.ShapedArray(spec.shape, spec.dtype) for spec in results]


def _lower_program(context: Any, *operands: Any, module: bytes, results: Any) -> Any:
    target = context.module_context
    source = stablehlo.deserialize_portable_artifact(target.context, module)
    main: Any = ir.SymbolTable(source.operation)["main"]
    types = main.type.results
    name = mlir.merge_mlir_modules(target.module, "program", source, target.symbol_table)
    return func.CallOp(types, ir.FlatSymbolRefAttr.get(name), operands).results


_program.def_abstract_eval(_program_results)
mlir.register_lowering(_program, _lower_program)
