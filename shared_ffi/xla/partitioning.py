"""Partitions custom calls by heads for XLA, whose partitioner asks for it by target name.

The attribute ``arguments`` of a custom call holds all that is needed, each value in one spelling.
So equal programs have equal HLO in every process, whatever it called before, and programs that
another process exported are partitioned as well.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from jax._src.xla_bridge import register_plugin_callbacks
from jax.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from shared_ffi import (
    kv_cache_update,
    paged_attention,
    sharding,
    varlen_attention,
    varlen_attention_backward,
)
from shared_ffi.spec import ArraySpec, Call
from shared_ffi.xla import lowering

SHARED_OPS = (kv_cache_update, paged_attention, varlen_attention, varlen_attention_backward)
"""The ops whose heads several devices can share."""


def register() -> None:
    """Registers how custom calls are partitioned, with jaxlib and with its plugins."""
    for op in SHARED_OPS:
        register_partitioner = partial(
            xla_client.register_custom_call_partitioner,
            name=op.TARGET,
            prop_user_sharding=_propagate_from_users,
            partition=partial(_partition, op),
            infer_sharding_from_operands=partial(_infer_results, op),
            can_side_effecting_have_replicated_sharding=True,
        )
        register_partitioner()
        register_plugin_callbacks(register_partitioner)


def _partition(
    op: ModuleType,
    operand_shapes: Sequence[Any],
    operand_shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    attributes: bytes,
) -> tuple[bytes, Sequence[Any], Any]:
    """The program of one device, and the shardings that it needs of operands and results."""
    result_shapes, result_shardings = _elements(result_shape), _elements(result_sharding)
    arrays = [*operand_shardings, *result_shardings]
    whole = _call(op, operand_shapes, attributes)
    is_manual = any(x.is_manual() for x in arrays)  # each device has its part already
    devices = None if is_manual else sharding.by_heads(whole, [*map(_devices, arrays)])
    call = whole
    if devices is not None:
        call = whole.on(sharding.parts(whole, devices))
    if not is_manual:
        operand_shardings, result_sharding = _shardings(
            whole, devices, operand_shardings, result_shape
        )
    module = _module(call, [*map(_spec, result_shapes)])
    return module, operand_shardings, result_sharding


def _infer_results(
    op: ModuleType,
    operand_shapes: Sequence[Any],
    operand_shardings: Sequence[Any],
    result_shape: Any,
    attributes: bytes,
) -> Any:
    """The shardings of results that follow from those of operands."""
    call = _call(op, operand_shapes, attributes)
    devices = sharding.by_heads(call, [*map(_devices, operand_shardings)])
    return _shardings(call, devices, operand_shardings, result_shape)[1]


def _propagate_from_users(user_sharding: Any, *_: Any) -> Any:
    """The sharding of results that a user of them asks for."""
    return user_sharding


def _call(op: ModuleType, operand_shapes: Sequence[Any], attributes: bytes) -> Call:
    """The checked call that an instruction was lowered from."""
    with mlir.make_ir_context():
        by_name = ir.DictAttr(ir.Attribute.parse(attributes.decode()))
        if "arguments" not in by_name:
            raise ValueError(
                f"{op.OP}: the attribute arguments is missing: this program was made by an older "
                "version, and several devices can share it only if it is lowered or exported again"
            )
        arguments = ir.StringAttr(by_name["arguments"]).value
    names, options = ast.literal_eval(arguments)  # see Call.arguments_as_text
    specs = map(_spec, operand_shapes)
    call: Call = op.check(**dict(zip(names, specs, strict=True)), **options)
    return call


def _spec(shape: Any) -> ArraySpec:
    return ArraySpec(tuple(shape.dimensions()), shape.numpy_dtype().name)


def _elements(shape_or_sharding: Any) -> list[Any]:
    """The shapes or shardings of a tuple; of one array, its own."""
    is_tuple = getattr(shape_or_sharding, "is_tuple", None)
    if is_tuple is not None:
        return shape_or_sharding.tuple_shapes() if is_tuple() else [shape_or_sharding]
    return shape_or_sharding.tuple_elements() or [shape_or_sharding]


def _devices(array_sharding: Any) -> np.ndarray | None:
    """The devices that have each tile of an array; None if it is not tiled."""
    if array_sharding is None or not array_sharding.is_tiled():
        return None
    tiles = array_sharding.tile_assignment_dimensions()
    return np.array(array_sharding.tile_assignment_devices()).reshape(tiles)


def _shardings(
    call: Call, devices: np.ndarray | None, operand_shardings: Sequence[Any], result_shape: Any
) -> tuple[list[Any], Any]:
    """The shardings of operands and of the result, or the tuple of results."""
    hlo_sharding = xla_client.HloSharding
    texts = sharding.shardings(call, devices)
    shardings = [hlo_sharding.from_string(text) for text in texts]
    results = shardings[len(operand_shardings) :]
    if not result_shape.is_tuple():
        return shardings[: len(operand_shardings)], results[0]
    scratch = [hlo_sharding.replicate()] * (len(result_shape.tuple_shapes()) - len(results))
    result_sharding = hlo_sharding.tuple_sharding(result_shape, [*results, *scratch])
    return shardings[: len(operand_shardings)], result_sharding


def _module(call: Call, results: Sequence[ArraySpec]) -> bytes:
    """A module whose main function makes the call.

    Args:
        results: of the call on whole arrays. Where it has more than the op has, the call has CUDA's
            scratch. Nobody reads it, so any array of that shape takes its place.
    """
    has_scratch = len(results) > len(call.results)
    own_results = call.results_on("cuda" if has_scratch else "cpu")
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function: Any = func.FuncOp
            operand_types = [*map(_ir_type, call.operands)]

            @function.from_py_func(*operand_types, name="main")  # type: ignore[untyped-decorator]
            def main(*operands: ir.Value) -> Any:
                context = SimpleNamespace(
                    avals_in=[*map(lowering.array_type, call.operands)],
                    avals_out=[*map(lowering.array_type, own_results)],
                )
                result_types = [*map(_ir_type, own_results)]
                values = [*lowering.custom_call(call, context, operands, result_types=result_types)]
                if has_scratch:
                    values[-1] = _zeros(results[-1])
                return values

        return mlir.module_to_bytecode(module)


def _ir_type(spec: ArraySpec) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(spec.shape, mlir.dtype_to_ir_type(np.dtype(spec.dtype)))


def _zeros(spec: ArraySpec) -> ir.Value:
    array_type = _ir_type(spec)
    zero = ir.IntegerAttr.get(array_type.element_type, 0)
    zeros: ir.Value = stablehlo.constant(ir.DenseElementsAttr.get_splat(array_type, zero))
    return zeros
