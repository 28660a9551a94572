"""The ops on DTensors: each process calls the kernel on its part of the heads, and nothing is sent.

DTensor's own rules (``register_sharding``) would gather a cache that is sharded otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shared_ffi import sharding
from shared_ffi._native import Untraced
from shared_ffi.spec import dtype_error, value_error
from torch_frontend.operator.arguments import ArgumentReader, as_returned, specs

READERS: dict[str, ArgumentReader] = {}
"""By its name, each operator whose rule is not registered yet."""

_REMEDY = "Redistribute it, or call the op on local tensors"


def register(library: torch.library.Library) -> None:
    """Registers the rules, once there can be a DTensor: to import its module takes seconds."""
    if READERS and "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor  # noqa: PLC0415

        while READERS:
            name, reader = READERS.popitem()
            rule = Untraced(partial(_run, reader))
            torch.library.register_torch_dispatch(name, DTensor, rule, lib=library)


def _run(
    reader: ArgumentReader,
    cls: Any,
    overload: torch._ops.OpOverload,
    types: Sequence[type],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] | None,
) -> Any:
    """Calls the operator on the local parts, and returns DTensors."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (see register)

    keywords = dict(keywords or {})
    bound = reader.read(arguments, {name: x for name, x in keywords.items() if name != "out"})
    call = bound.on(specs(bound.tensors))
    mesh = next(x.device_mesh for x in bound.tensors if isinstance(x, DTensor))
    axes = _Axes(call.op, mesh)
    operands = [axes.of(name, x) for name, x in zip(bound.names, bound.tensors, strict=True)]
    results = sharding.result_specs(call, operands, axes.sizes, _REMEDY, axes.show)
    head_dims = call.head_dims or (None,) * len(operands)
    heads = [*zip(bound.names, operands, head_dims, strict=False)]
    shared = next((dims[dim] for _, dims, dim in heads if dim is not None and dims[dim]), ())
    for name, dims, dim in heads:
        if dim is not None and dims[dim] != shared:
            rule = f"be sharded along dimension {dim}, as the other operands' heads are"
            raise value_error(call.op, name, rule, axes.show(dims), _REMEDY)
    if (out := keywords.get("out")) is not None and axes.of("out", out) != results[0]:
        rule = f"be sharded as the result, {axes.show(results[0])}"
        raise value_error(call.op, "out", rule, axes.show(axes.of("out", out)), _REMEDY)

    def local(x: Any) -> Any:
        return x.to_local() if isinstance(x, DTensor) else x

    output = overload(*map(local, arguments), **{name: local(x) for name, x in keywords.items()})
    if not overload._schema.returns:
        return None
    outputs = [output] if isinstance(output, torch.Tensor) else output
    wrapped = []
    for i, (x, spec, dims) in enumerate(zip(outputs, call.results, results, strict=True)):
        shape = torch.Size(spec.shape)
        placements = axes.placements(dims, shared if i in call.summed else ())
        wrapped.append(DTensor.from_local(x, mesh, placements, shape=shape, stride=_strides(shape)))
    return as_returned(wrapped)


def refuse_dtensors(op: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """For a function that mixes its tensors with others, which DTensor refuses without a name."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (see register)

    for name, tensor in zip(names, tensors, strict=True):
        if isinstance(tensor, DTensor):
            rule = "type torch.Tensor, as all devices need all of it"
            raise dtype_error(op, name, rule, "DTensor", f"Pass {name}.full_tensor()")


def sharded_as(like: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a result. Autograd may have sharded that of a DTensor otherwise."""
    if "torch.distributed.tensor" not in sys.modules:
        return gradient
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (see register)

    if not isinstance(like, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    return gradient.redistribute(like.device_mesh, like.placements)


class _Axes:
    """The axes of a mesh that dimensions are sharded along."""

    def __init__(self, op: str, mesh: Any) -> None:
        self._op = op
        self._mesh = mesh
        names = map(str, mesh.mesh_dim_names or range(mesh.ndim))
        self.sizes = dict(zip(names, mesh.shape, strict=True))

    def of(self, name: str, tensor: Any) -> list[sharding.Axes]:
        """The axes of each dimension of a tensor; see sharding.result_specs."""
        from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  (see register)

        if not isinstance(tensor, DTensor):
            rule, got = "type DTensor beside DTensors", type(tensor).__name__
            remedy = "Pass it through distribute_tensor, with Replicate()"
            raise dtype_error(self._op, name, rule, got, remedy)
        if tensor.device_mesh != self._mesh:
            rule = f"be on the first DTensor's mesh, {self._mesh}"
            remedy = "Distribute all tensors over one mesh"
            raise value_error(self._op, name, rule, tensor.device_mesh, remedy)
        dims: list[sharding.Axes] = [()] * tensor.ndim
        for axis, placement in zip(self.sizes, tensor.placements, strict=True):
            if type(placement) is Shard:
                dims[placement.dim] += (axis,)
            elif not placement.is_replicate():
                raise value_error(self._op, name, "be sharded or replicated", placement, _REMEDY)
        return dims

    def placements(self, dims: Sequence[sharding.Axes], summed: sharding.Axes = ()) -> list[Any]:
        """The inverse of `of`. `summed`: the axes along which devices have parts of a sum."""
        from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415

        sharded: dict[str, Any] = {axis: Partial() for axis in summed}
        sharded |= {axis: Shard(dim) for dim, axes in enumerate(dims) for axis in axes}
        return [sharded.get(axis, Replicate()) for axis in self.sizes]

    def show(self, dims: Sequence[sharding.Axes]) -> str:
        """The placements, for messages."""
        return str(self.placements(dims))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return (*reversed(strides),)
