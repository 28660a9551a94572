"""``torch.compile(backend="openxla")`` for PyTorch's own CUDA and CPU tensors.

torch_xla 2.9 takes only its own tensors, and cannot share memory with PyTorch's CUDA tensors. So
torch_xla only traces a graph of other tensors, on placeholders without memory. JAX's client for the
tensors' device then runs the program on the tensors' memory. DLPack exchanges it in both
directions, and makes PyTorch's stream and XLA's wait for each other. The program holds the same
custom calls as everywhere.

XLA does not write to memory that it has only borrowed. A cache that our update overwrites is
written where it lies all the same (``in_place.py``); any other argument that the graph overwrites
costs two copies of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import _XLAC
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack
from torch_xla.core import dynamo_bridge, xla_builder

from shared_ffi.spec import ArraySpec
from torch_frontend.compilers.in_place import cut_at_updates
from torch_frontend.operator.arguments import array_spec
from torch_frontend.operator.export import export_platform

GraphInputs = Sequence[Any]  # tensors, and numbers, which the program holds as constants

_WHO = "torch.compile(backend='openxla')"

_ALIGNMENT = 16  # bytes: XLA's kEntryParameterAlignBytes, what its programs assume of an operand

_MAX_PROGRAMS = 256  # of a graph, whose sizes may be symbols

_NARROW_FLOATS = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)

# Dispatch keys of kernels that torch_xla can trace; an operator without any runs on the CPU.
_LOWERED = (
    "XLA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


def install() -> None:
    """Makes torch_xla's backend pass such graphs to compile_graph; may be called again."""
    upstream: Any = dynamo_bridge.extract_compiled_graph
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def extract_compiled_graph(graph: torch.fx.GraphModule, arguments: GraphInputs) -> Any:
        devices = {x.device.type for x in arguments if isinstance(x, torch.Tensor)}
        if devices and devices <= {"cpu", "cuda"}:
            return compile_graph(graph)
        return upstream(graph, arguments)

    bridge: Any = dynamo_bridge
    bridge.extract_compiled_graph = extract_compiled_graph


def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., list[Any]]:
    """Returns a function that runs the graph as XLA programs, with updates of caches in between."""
    return cut_at_updates(graph, _compile_part) or _compile_part(graph)


def _compile_part(graph: torch.fx.GraphModule) -> Callable[..., list[Any]]:
    """Returns a function that compiles the graph for each new set of shapes, dtypes and numbers."""
    programs: dict[Any, Callable[[GraphInputs], list[Any]]] = {}

    def run(*arguments: Any) -> list[Any]:
        key = tuple(
            # 1, 1.0 and True are equal, but constants of different programs.
            (x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), repr(x))
            for x in arguments
        )
        if key not in programs:
            if len(programs) == _MAX_PROGRAMS:
                del programs[next(iter(programs))]  # the oldest
            programs[key] = _program(graph, arguments)
        return programs[key](arguments)

    return run


def _program(
    graph: torch.fx.GraphModule, arguments: GraphInputs
) -> Callable[[GraphInputs], list[Any]]:
    from shared_ffi.xla import programs  # noqa: PLC0415  (needs JAX)

    _check_can_be_exchanged(arguments)
    device = _device_of(arguments)
    trace = trace_on_placeholders(graph, arguments, device.type)
    constants = {i: _to_jax(value.to(device)) for i, value in trace.constants.items()}
    compiled = programs.compile_stablehlo(
        trace.program,
        trace.operands,
        trace.results,
        _to_jax(torch.empty(1, device=device)).device,
    )

    def run(arguments: GraphInputs) -> list[Any]:
        operands = [
            constants[i] if source is None else _to_jax(arguments[source].to(device))
            for i, source in enumerate(trace.sources)
        ]
        results = map(from_dlpack, compiled(*operands))
        return [next(results) if isinstance(x, ArraySpec) else x for x in trace.outputs]

    return run


def _device_of(arguments: GraphInputs) -> torch.device:
    """Returns the tensors' GPU if one of them is on a GPU, otherwise the CPU. With a GPU,
    scalar tensors on the CPU are copied to it."""
    devices = {x.device for x in arguments if isinstance(x, torch.Tensor)}
    gpus = {device for device in devices if device.type == "cuda"}
    if len(gpus) > 1:
        raise ValueError(
            f"{_WHO}: all CUDA tensors must be on one device; got {sorted(map(str, gpus))}. "
            "Compile the part of the model on each GPU by itself"
        )
    return (gpus or devices).pop()


def _check_can_be_exchanged(arguments: GraphInputs) -> None:
    for x in arguments:
        if isinstance(x, torch.Tensor) and x.dtype in _NARROW_FLOATS:
            raise NotImplementedError(
                f"{_WHO}: PyTorch cannot exchange tensors of floats of 8 or 4 bits with JAX; got "
                f"{x.dtype} on {x.device.type}. Compile with backend='inductor', or give it XLA "
                "tensors, for float4_e2m1fn_x2 of uint8 with codes='e2m1'"
            )


def _to_jax(tensor: torch.Tensor) -> Any:
    import jax  # noqa: PLC0415  (torch_xla alone does not need it)

    dense = tensor.detach().contiguous()
    if dense.data_ptr() % _ALIGNMENT:
        dense = dense.clone()
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(dense)


@dataclass(frozen=True)
class Trace:
    """The program that torch_xla makes of a graph. No field is a torch_xla tensor: torch_xla would
    compute it at the next step.

    Attributes:
        program: a portable StableHLO artifact.
        operands: what the program takes.
        sources: for each operand the number of the argument, or None for a constant.
        constants: {number of the operand: tensor on the CPU}.
        results: what the program returns.
        outputs: what the graph returns: the results, between numbers and None.
    """

    program: bytes
    operands: list[ArraySpec]
    sources: list[int | None]
    constants: dict[int, torch.Tensor]
    results: list[ArraySpec]
    outputs: list[Any]


def trace_on_placeholders(
    graph: torch.fx.GraphModule, arguments: GraphInputs, platform: str
) -> Trace:
    """Traces a graph with torch_xla, on placeholders for the arguments; computes nothing.

    Raises:
        NotImplementedError: the graph draws random numbers, or torch_xla cannot lower it.
    """
    placeholders = [
        xla_builder.create_placeholder_tensor(x.shape, x.dtype)
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    ]
    positions = {
        _XLAC._xla_get_tensor_id(x): i
        for i, x in enumerate(placeholders)
        if isinstance(x, torch.Tensor)
    }
    with torch.no_grad(), export_platform(platform):
        outputs = _OnXla(graph).run(*placeholders)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    results = [x for x in outputs if isinstance(x, torch.Tensor)]
    ids, operands = _XLAC._get_tensors_xla_device_data_node(results)
    sources = [positions.get(number) for number in ids]
    return Trace(
        program=xm.get_stablehlo_bytecode(results),  # type: ignore[arg-type]
        operands=list(map(_spec, operands)),
        sources=sources,
        constants={i: x.cpu() for i, x in enumerate(operands) if sources[i] is None},
        results=list(map(_spec, results)),
        outputs=[_spec(x) if isinstance(x, torch.Tensor) else x for x in outputs],
    )


class _OnXla(torch.fx.Interpreter):
    """Runs a graph with every device in it replaced by torch_xla's."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if isinstance(n.target, torch._ops.OpOverload):
            _check_can_be_held(n.target)
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        return pytree.tree_map_only(
            torch.device, lambda _: torch_xla.device(), super().fetch_args_kwargs_from_env(n)
        )

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.to(torch_xla.device()) if isinstance(value, torch.Tensor) else value


def _check_can_be_held(op: torch._ops.OpOverload) -> None:
    """Refuses operators that torch_xla would run during the trace: placeholders have no values."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotImplementedError(
            f"{_WHO}: no random numbers on CUDA or CPU tensors; got {op}. Draw them outside of the "
            "compiled function"
        )
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _LOWERED):
        raise NotImplementedError(
            f"{_WHO}: torch_xla cannot lower {op}. Keep it out of the compiled function, or "
            "compile with backend='inductor'"
        )


def _spec(tensor: torch.Tensor) -> ArraySpec:
    return array_spec(tensor.shape, tensor.dtype)
