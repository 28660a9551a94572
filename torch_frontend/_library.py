"""Defines ops of the namespace ``xla_gpu``: one schema and one check give every kernel of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from shared_ffi import eager
from shared_ffi.spec import ArraySpec, Call

_LIBRARY = torch.library.Library("xla_gpu", "DEF")

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}

_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class CheckedCalls:
    """Checks the arguments of an op as its kernels receive them.

    A schema has its tensors first, then other arguments; keyword-only ones after them, tensors and
    others in any order.
    """

    def __init__(self, schema: torch.FunctionSchema, check: Callable[..., Call]) -> None:
        positional = [str(x.type) for x in schema.arguments if not x.kwarg_only]
        keyword_only = [x for x in schema.arguments if x.kwarg_only]
        self._num_tensors = positional.count("Tensor")
        self._nones = (None,) * len(positional)
        self._optional_tensors = [x.name for x in keyword_only if "Tensor" in str(x.type)]
        self._name = schema.name.removeprefix("xla_gpu::")
        self._check = check
        # Shapes and dtypes repeat from call to call.
        self._cached_check = lru_cache(maxsize=4096)(self._check_sizes)

    def __call__(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Call, Sequence[torch.Tensor]]:
        """The call, and its tensors in the order of its operands."""
        return self._checked(self._cached_check, arguments, keywords)

    def symbolic(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Call, Sequence[torch.Tensor]]:
        """The same where sizes may be symbols, which cannot be cached by value."""
        return self._checked(self._check_sizes, arguments, keywords)

    def _checked(
        self,
        check_sizes: Callable[..., Call],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> tuple[Call, Sequence[torch.Tensor]]:
        tensors = arguments[: self._num_tensors]
        # The dispatcher omits trailing arguments that are None, the only default that those before
        # the keyword-only ones have here; of these it omits all that have their default.
        others = (*arguments[self._num_tensors :], *self._nones[len(arguments) :])
        given: tuple[str, ...] = ()
        options: tuple[tuple[str, Any], ...] = ()
        if keywords:
            given = tuple(x for x in self._optional_tensors if keywords.get(x) is not None)
            tensors = (*tensors, *(keywords[name] for name in given))
            options = tuple(x for x in keywords.items() if x[0] not in self._optional_tensors)
        _refuse_grad(self._name, tensors)
        sizes = [x for tensor in tensors for x in (tensor.shape, tensor.dtype)]
        return check_sizes(others, given, options, *sizes), tensors

    def _check_sizes(
        self,
        others: tuple[Any, ...],
        given: tuple[str, ...],
        options: tuple[tuple[str, Any], ...],
        *sizes: Any,
    ) -> Call:
        specs = list(map(array_spec, sizes[::2], sizes[1::2]))
        optional = dict(zip(given, specs[self._num_tensors :], strict=True))
        return self._check(*specs[: self._num_tensors], *others, **optional, **dict(options))


def define(schema: str, check: Callable[..., Call]) -> torch._ops.OpOverload:
    """Defines ``xla_gpu::<schema>`` for CPU, XLA and fake tensors.

    Args:
        schema: name, arguments and results as torch.library writes them; the tensors come first,
            and the one that the op writes in place, if there is one, before the others.
        check: the op's check in shared_ffi; takes ArraySpecs for the tensors, then the rest.
    """
    _LIBRARY.define(schema)
    name, _, signature = schema.partition("(")
    packet, _, overload = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.xla_gpu, packet), overload or "default")
    calls = CheckedCalls(op._schema, check)
    if op._schema.is_mutable:
        _implement_in_place(op, name, signature, calls)
    else:
        _implement(op, name, calls)
    return op


def _implement(op: torch._ops.OpOverload, name: str, calls: CheckedCalls) -> None:
    def cpu(*arguments: Any, **keywords: Any) -> Any:
        call, tensors = calls(arguments, keywords)
        results = _allocate(call.results, tensors[0])
        _run_on_cpu(call, tensors, results)
        return _as_returned(results)

    def cuda(*arguments: Any, **keywords: Any) -> Any:
        call, tensors = calls(arguments, keywords)
        results = _allocate(call.results_on("cuda"), tensors[0])
        _run_on_cuda(call, tensors, results)
        return _as_returned(results[: len(call.results)])

    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    _implement_on_xla(op, name, calls)


def _implement_in_place(
    op: torch._ops.OpOverload, name: str, signature: str, calls: CheckedCalls
) -> None:
    """The op becomes a composite of two private ones, so that each compiler gets what it can keep
    in place: a mutable op on the CPU, which Inductor knows how to run without a copy; on XLA, whose
    tensors are values, a functional op whose result is assigned to the operand."""
    mutable_name, functional_name = f"_{name}_mutable", f"_{name}_functional"
    _LIBRARY.define(f"{mutable_name}({signature}")
    _LIBRARY.define(
        f"{functional_name}({signature}".replace("Tensor(a!)", "Tensor").replace("()", "Tensor")
    )
    mutable = getattr(torch.ops.xla_gpu, mutable_name).default
    functional = getattr(torch.ops.xla_gpu, functional_name).default

    def composite(*arguments: Any) -> None:
        if arguments[0].device.type == "xla":
            xla(*arguments)
        else:
            mutable(*arguments)

    def xla(*arguments: Any) -> None:
        arguments[0].copy_(functional(*arguments))

    def checked(arguments: Sequence[Any]) -> tuple[Call, Sequence[torch.Tensor]]:
        target = arguments[0]
        if not target.is_contiguous():
            raise ValueError(
                f"{name}: {op._schema.arguments[0].name} must be contiguous, as it is written in "
                f"place; got strides {list(target.stride())} for shape {list(target.shape)}. "
                "Allocate it contiguous"
            )
        return calls(arguments, {})

    def cpu(*arguments: Any) -> None:
        call, tensors = checked(arguments)
        _run_on_cpu(call, tensors, tensors[:1])

    def cuda(*arguments: Any) -> None:
        call, tensors = checked(arguments)
        _run_on_cuda(call, tensors, tensors[:1])

    def fake(*arguments: Any) -> None:
        calls.symbolic(arguments, {})

    _LIBRARY.impl(name, composite, "CompositeImplicitAutograd")
    _LIBRARY.impl(mutable_name, cpu, "CPU")
    _LIBRARY.impl(mutable_name, cuda, "CUDA")
    # Reached by a graph that was exported on the CPU and moved to an XLA device.
    _LIBRARY.impl(mutable_name, xla, "XLA")
    torch.library.register_fake(f"xla_gpu::{mutable_name}", fake, lib=_LIBRARY)
    _implement_on_xla(functional, functional_name, calls)


def _implement_on_xla(op: torch._ops.OpOverload, name: str, calls: CheckedCalls) -> None:
    def xla(*arguments: Any, **keywords: Any) -> Any:
        from torch_frontend import xla as door  # noqa: PLC0415  (needs torch_xla and JAX)

        return _as_returned(door.run(*calls(arguments, keywords)))

    def fake(*arguments: Any, **keywords: Any) -> Any:
        call, tensors = calls.symbolic(arguments, keywords)
        return _as_returned(_allocate(call.results, tensors[0]))

    def autograd(*arguments: Any, **keywords: Any) -> Any:
        calls(arguments, keywords)  # refuses; the kernel sees tensors that require no grad
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments, **keywords)

    _LIBRARY.impl(name, xla, "XLA")
    _LIBRARY.impl(name, autograd, "AutogradXLA")
    torch.library.register_fake(f"xla_gpu::{name}", fake, lib=_LIBRARY)


def _allocate(specs: Sequence[ArraySpec], like: torch.Tensor) -> list[torch.Tensor]:
    return [like.new_empty(spec.shape, dtype=_DTYPES[spec.dtype]) for spec in specs]


def _as_returned(results: Sequence[torch.Tensor]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _run_on_cpu(
    call: Call, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    # Capsules, because Tensor.__dlpack__ is Python: it would cost more than all the rest.
    operands = [to_dlpack(tensor.contiguous()) for tensor in tensors]
    eager.run_on_cpu(call, operands, [to_dlpack(x) for x in results], torch.get_num_threads())


def _run_on_cuda(
    call: Call, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    """Queues the call on PyTorch's current stream; waits for nothing, so it can be captured."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(
                f"{call.op}: all tensors must be on one device; got {tensor.device} beside {device}"
            )
    operands = [to_dlpack(tensor.contiguous()) for tensor in tensors]
    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        eager.run_on_cuda(call, operands, [to_dlpack(result) for result in results], stream)


def _refuse_grad(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            f"{name}: inference only, it has no derivative; got an operand that requires grad. "
            "Call it under torch.inference_mode() or torch.no_grad(), or detach() the operand"
        )


def array_spec(shape: torch.Size, dtype: torch.dtype) -> ArraySpec:
    """A tensor's shape and dtype in the terms of shared_ffi."""
    return ArraySpec(tuple(shape), _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch."))
