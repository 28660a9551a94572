"""The custom call in the programs that JAX traces: JAX's primitive and its lowering."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from shared_ffi import cuda_driver, kernel_log, sharding
from shared_ffi.spec import ArraySpec, Call, Extremes, value_error

call_p: Any = Primitive("xla_gpu")
"""The custom call of an op. Its parameter ``call`` is the checked call."""
call_p.multiple_results = True

EXTREMES = Extremes(jax.core.min_dim, jax.core.max_dim, are_quick=False)


def make(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Makes the custom call, in a function that JAX traces. ``runtimes.register`` comes before."""
    return tuple(call_p.bind(*vary_alike(operands), call=call))


def vary_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Under ``jax.shard_map``, lets each operand vary over the mesh axes that any of them does."""
    axes = [_varying_axes(jax.typeof(x)) for x in operands]
    union = frozenset().union(*axes)
    return [
        _cast_to_varying(x, tuple(sorted(union - own))) if own != union else x
        for x, own in zip(operands, axes, strict=True)
    ]


def _varying_axes(array_type: Any) -> frozenset[str]:
    if hasattr(array_type, "manual_axis_type"):  # JAX 0.10 and newer
        return array_type.manual_axis_type.varying
    return array_type.vma


def _cast_to_varying(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if hasattr(jax.lax, "pcast"):  # JAX 0.9 and newer
        return jax.lax.pcast(array, axes, to="varying")
    return jax.lax.pvary(array, axes)  # type: ignore[attr-defined,no-any-return]


def _result_types(*operands: Any, call: Call) -> list[Any]:
    """The types of the results: shapes, dtypes and, on a mesh with explicit axes, shardings. The
    axes that the results vary over are those of the operands."""
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    sizes = {} if mesh is None else dict(mesh.shape)
    axes_of_dims = [_axes_of_dims(call, x) for x in operands]
    specs = sharding.result_specs(call, axes_of_dims, sizes, _REMEDY, _partition_spec)
    mesh = mesh or operands[0].sharding.mesh
    return [
        operands[0].update(
            shape=result.shape,
            dtype=np.dtype(result.dtype),
            weak_type=False,
            sharding=NamedSharding(mesh, PartitionSpec(*[axes or None for axes in spec])),
        )
        for result, spec in zip(call.results, specs, strict=True)
    ]


_REMEDY = "Pass it through jax.sharding.reshard, or call the op in jax.shard_map"


def _axes_of_dims(call: Call, operand: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that each dimension of an operand is sharded along."""
    spec = operand.sharding.spec
    if getattr(spec, "unreduced", None):
        rule = "be reduced over every mesh axis"
        raise value_error(call.op, "each operand", rule, spec, _REMEDY)
    return tuple(() if x is None else x if isinstance(x, tuple) else (x,) for x in spec)


def _partition_spec(dims: Sequence[sharding.Axes]) -> str:
    names = [repr(x[0]) if len(x) == 1 else repr(x) if x else "None" for x in dims]
    return f"PartitionSpec({', '.join(names)})"


def _lower(platform: str, context: Any, *operands: ir.Value, call: Call) -> Any:
    if platform == "cuda" and _has_cuda_devices():  # else it is exported for another machine
        cuda_driver.check()
    kernel_log.log(call, platform, partial(_copies, call, context.module_context.module, operands))
    results = call.results_on(platform, EXTREMES)
    context = context.replace(avals_out=[*map(array_type, results)])
    values = custom_call(call, context, operands)
    if rule := sharding.shardy_rule(call, results):
        instruction: Any = values[0].owner
        instruction.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)
    return values[: len(call.results)]


is_for_jax = ContextVar("is_for_jax", default=True)
"""Whether JAX runs the programs that it lowers now, and not another framework."""


def _copies(call: Call, module: ir.Module, operands: Sequence[ir.Value]) -> list[str]:
    """For the log: the operands that XLA copies before the call writes to them, and why.

    JAX lowers a call in a function of its own, so that it is known only which arguments of the
    program have an operand's type. The caller keeps one that is not donated.
    """
    if not is_for_jax.get():
        return []
    main: Any = ir.SymbolTable(module.operation)["main"]
    attributes = list(main.attributes["arg_attrs"])
    found = []
    for number, _ in call.aliases:
        alike = [
            x
            for x, type in zip(attributes, main.type.inputs, strict=True)
            if type == operands[number].type
        ]
        donated = [x for x in alike if "tf.aliasing_output" in x or "jax.buffer_donor" in x]
        if alike and not donated:
            reason = "if it is an argument, as none like it is donated (donate_argnums)"
            found.append(f"copies {call.names[number]} {reason}")
    return found


def custom_call(
    call: Call, context: Any, operands: Sequence[ir.Value], **options: Any
) -> Sequence[ir.Value]:
    """Adds the custom call to a module. csrc/ffi/handlers.cc has the handlers by target.

    Args:
        context: has the types ``avals_in`` of the operands and ``avals_out`` of the results.
        options: of ``jax.ffi.ffi_lowering``.
    """
    attributes: dict[str, Any] = dict(call.attributes)
    if call.head_dims:
        attributes["arguments"] = call.arguments_as_text()
    aliases = dict(call.aliases)
    lower: Any = jax.ffi.ffi_lowering(call.target, operand_output_aliases=aliases, **options)
    values: Sequence[ir.Value] = lower(context, *operands, **attributes)
    return values


def array_type(spec: ArraySpec) -> jax.core.ShapedArray:
    """JAX's type of an array."""
    return jax.core.ShapedArray(spec.shape, np.dtype(spec.dtype))


def _has_cuda_devices() -> bool:
    try:
        return len(jax.devices("cuda")) > 0
    except RuntimeError:  # JAX has no such backend here
        return False


def _run(*operands: jax.Array, call: Call) -> Any:
    """Runs the call outside of a traced function."""
    with jax.disable_jit(False):
        return jax.jit(partial(make, call))(*operands)


call_p.def_abstract_eval(_result_types)
call_p.def_impl(_run)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(call_p, partial(_lower, _platform), platform=_platform)
