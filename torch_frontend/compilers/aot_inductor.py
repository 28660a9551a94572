"""Programs that PyTorch compiles ahead of time and that run without this package."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import IO, Any

import numpy as np
import torch

from shared_ffi import library_path
from shared_ffi.spec import Extremes, dtype_error, value_error
from torch_frontend.operator.arguments import allocate, as_returned
from torch_frontend.operator.define import COMPILED_OPS, Operator

_LIBRARY = torch.library.Library("xla_gpu", "FRAGMENT")
_LIBRARY.define(
    "_xla_gpu_call(Tensor(a!)[] written, Tensor[] operands, int[] aliases, int[] spanned, "
    "str target, str[] int_names, SymInt[] ints, str[] float_names, float[] floats) -> ()",
    tags=[torch.Tag.needs_exact_strides],
)
torch.library.register_fake("xla_gpu::_xla_gpu_call", lambda *_: None, lib=_LIBRARY)

HANDLER_CALL: torch._ops.OpOverload = torch.ops.xla_gpu._xla_gpu_call.default
"""Calls any handler: the only op of a program that runs without this package. Its kernels are in C
(``shared_ffi/csrc/torch/aot_inductor.cc``, which explains the arguments)."""

# The functions of shared_ffi/csrc/torch/aot_inductor.cc; AOTInductor adds the last argument.
_DECLARATIONS = [
    f"AOTITorchError aoti_torch_{device}__xla_gpu_call(const AtenTensorHandle*, int64_t, "
    "const AtenTensorHandle*, int64_t, const int64_t*, int64_t, const int64_t*, int64_t, "
    "const char*, const char**, int64_t, const int64_t*, int64_t, const char**, int64_t, "
    "const double*, int64_t, AtenTensorHandle*)"
    for device in ("cpu", "cuda")
]


def aoti_compile_and_package(
    exported_program: torch.export.ExportedProgram,
    *,
    package_path: str | os.PathLike[str] | IO[bytes] | None = None,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Compiles a program with these ops as ``torch._inductor.aoti_compile_and_package`` does, so
    that it runs in Python and in C++ where this package is not installed.

    Besides PyTorch, the compiled program needs only the file ``shared_ffi.library_path()``, and
    remembers where it lies now. On another machine, load the library before the program, with
    ``torch.ops.load_library``, ``ctypes.CDLL`` or ``dlopen``, or put its folder into
    ``LD_LIBRARY_PATH``.

    A cache is updated in place, whether it is a buffer of the module or an argument.

    When the CPU handler refuses lengths or tables, the run raises the RuntimeError that AOTInductor
    has for all failures. Its standard error says why, and so does the library's
    ``const char* xla_gpu_last_error()``.

    Args:
        exported_program: the result of ``torch.export.export``, for the CPU or for CUDA.
        package_path: ends in ``.pt2``; by default a file in Inductor's cache.
        inductor_configs: Inductor's own options.

    Returns:
        The path of the compiled program.

    Raises:
        ValueError: ``run_decompositions`` has made the program functional, which hides its in-place
            ops; pass it as ``torch.export.export`` returned it.
        TypeError: it has tensors of float4_e2m1fn_x2, for which Inductor has no C++ type.
    """
    _refuse_functional(exported_program)
    _refuse_float4(exported_program)
    library = library_path()
    configs = dict(inductor_configs or {})
    shims = configs.get("aot_inductor.custom_ops_to_c_shims") or {}
    libraries = configs.get("aot_inductor.custom_op_libs") or []
    configs["aot_inductor.custom_ops_to_c_shims"] = {**shims, HANDLER_CALL: _DECLARATIONS}
    # Inductor has no option for folders, but copies a library's name into the linker's command.
    folder = shlex.quote(str(library.parent))
    words = f"{library.stem.removeprefix('lib')} -L{folder} -Wl,-rpath,{folder}"
    configs["aot_inductor.custom_op_libs"] = [*libraries, words]
    if isinstance(package_path, os.PathLike):
        package_path = os.fspath(package_path)  # PyTorch 2.9.0 takes no other path
    with handler_calls():
        return torch._inductor.aoti_compile_and_package(
            exported_program, package_path=package_path, inductor_configs=configs
        )


def _refuse_functional(program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        op = node.args[0] if node.args else None
        if isinstance(op, torch._ops.OpOverload) and op.namespace == "xla_gpu":
            rule = "be as torch.export.export returned it"
            got = f"one made functional, with {node.target} of {op}"
            remedy = "Pass it without run_decompositions"
            raise value_error("aoti_compile_and_package", "exported_program", rule, got, remedy)


def _refuse_float4(program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.float4_e2m1fn_x2:
            rule = "dtypes that Inductor has in C++"
            remedy = f"Export with {node.name}.view(torch.uint8), and codes='e2m1'"
            name = "aoti_compile_and_package"
            raise dtype_error(name, "exported_program", rule, "float4_e2m1fn_x2", remedy)


_is_tracing: ContextVar[bool] = ContextVar("_is_tracing", default=False)


@contextmanager
def handler_calls() -> Iterator[None]:
    """Makes programs that are traced within it hold HANDLER_CALLs instead of the ops."""
    _intercept()
    token = _is_tracing.set(True)
    try:
        yield
    finally:
        _is_tracing.reset(token)


@cache
def _intercept() -> None:
    """Registers rules that replace the ops while a trace is made functional: after that, in-place
    ops cannot be recognized. The rules need private modules of PyTorch, so only a first use of
    handler_calls() imports them."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode  # noqa: PLC0415

    rules = {"xla_gpu::_xla_gpu_call": _functionalize}
    rules |= {name: partial(_trace, operator) for name, operator in COMPILED_OPS.items()}
    for name, rule in rules.items():
        torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule, lib=_LIBRARY)


def _functionalize(
    mode: Any, op: Any, types: Any, arguments: Sequence[Any], keywords: Any = None
) -> None:
    """Makes HANDLER_CALL functional. For AOTInductor the mode itself would choose the older way,
    which copies a view, such as a layer's cache in an array of all layers."""
    from torch._higher_order_ops.auto_functionalize import (  # noqa: PLC0415
        do_auto_functionalize_v2,
    )

    do_auto_functionalize_v2(mode, op, tuple(arguments), dict(keywords or {}))


def _trace(
    operator: Operator,
    mode: Any,
    op: Any,
    types: Any,
    arguments: Sequence[Any],
    keywords: Any = None,
) -> Any:
    """Traces an op: as HANDLER_CALL within handler_calls, as itself elsewhere."""
    if not _is_tracing.get():
        return mode.__torch_dispatch__(op, types, arguments, keywords)
    keywords = dict(keywords or {})
    out = keywords.pop("out", None)
    with mode:
        results = _call_handler(operator, tuple(arguments), keywords)
        if out is None:
            return results
        out.copy_(results)
        return None


def _call_handler(
    operator: Operator, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """Makes an op's HANDLER_CALL; sizes may be symbols."""
    from torch._higher_order_ops.auto_functionalize import get_base  # noqa: PLC0415

    bound = operator.read(arguments, keywords)
    operands, copied = operator.eager.in_memory(bound, takes_rows=False)
    tensors = [x.contiguous() if i in copied else x for i, x in enumerate(bound.tensors)]
    call = bound.on(operands)
    aliases = [operand for operand, _ in call.aliases]
    # A query is mostly computed by the program. Inductor would compute it twice, as an operand and
    # as what is written.
    whole = [i for i in aliases if bound.names[i] in operator.eager.rows]
    if aliases:
        # Passes the tensors whose views the operands are. Inductor 2.9 makes a written view again
        # after the call, at the wrong offset if the offset depends on sizes.
        bases = [
            base if (base := get_base(tensors[i])) is not None else tensors[i]
            for i in aliases
            if i not in whole
        ]
        written = list({id(base): base for base in bases}.values())
        written += [tensors[i].clone() for i in whole]
    else:
        extremes = Extremes(torch.sym_min, torch.sym_max)
        written = allocate(call.results_on(tensors[0].device.type, extremes), tensors[0])
    ints = {name: x for name, x in call.attributes if not isinstance(x, np.floating)}
    floats = {name: float(x) for name, x in call.attributes if isinstance(x, np.floating)}
    ranks = [len(spec.shape) for spec in call.operands]
    HANDLER_CALL(
        written,
        [x for i, x in enumerate(tensors) if i not in whole],
        [~i if i in whole else i for i in aliases],
        [i for i, tensor in enumerate(tensors) if tensor.dim() != ranks[i]],
        call.target,
        [*ints],
        [x.item() if isinstance(x, np.integer) else x for x in ints.values()],
        [*floats],
        [*floats.values()],
    )
    if not aliases:
        return as_returned(written[: len(call.results)])
    for i, rows in zip(reversed(whole), reversed(written), strict=False):
        bound.tensors[i].copy_(rows)
    return None
