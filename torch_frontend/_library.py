"""Defines ops of the namespace ``xla_gpu``: one schema and one check give every kernel of an op."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from shared_ffi import eager
from shared_ffi.spec import ArraySpec, Call

_LIBRARY = torch.library.Library("xla_gpu", "DEF")

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
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
    others in any order. Those called `strided` are read and written where they lie.
    """

    def __init__(
        self, schema: torch.FunctionSchema, check: Callable[..., Call], strided: Sequence[str]
    ) -> None:
        positional = [x for x in schema.arguments if not x.kwarg_only]
        keyword_only = [x for x in schema.arguments if x.kwarg_only]
        self._tensors = [x.name for x in positional if str(x.type) == "Tensor"]
        self._nones = (None,) * len(positional)
        self._optional_tensors = [x.name for x in keyword_only if "Tensor" in str(x.type)]
        self._strided = strided
        self._name = schema.name.removeprefix("xla_gpu::")
        self._check = check
        # Shapes and dtypes repeat from call to call.
        self._cached_check = lru_cache(maxsize=4096)(self._check_sizes)

    def __call__(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Call, Sequence[torch.Tensor]]:
        """The call, and its tensors in the order of its operands."""
        tensors, rest = self._split(arguments, keywords)
        return self._cached_check(rest, (), *_sizes(tensors)), tensors

    def symbolic(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Call, Sequence[torch.Tensor]]:
        """The same where sizes may be symbols, which cannot be cached by value."""
        tensors, rest = self._split(arguments, keywords)
        return self._check_sizes(rest, (), *_sizes(tensors)), tensors

    def in_memory(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any], symbolic: bool = False
    ) -> tuple[Call, Sequence[torch.Tensor]]:
        """The same, with contiguous tensors, and with those that may be strided as they are."""
        check = self._check_sizes if symbolic else self._cached_check
        tensors, rest = self._split(arguments, keywords)
        dense = [tensor.is_contiguous() for tensor in tensors]
        if all(dense):
            return check(rest, (), *_sizes(tensors)), tensors
        given = rest[1]
        names = [*self._tensors, *given]
        places = [i for i, name in enumerate(names) if not dense[i] and name in self._strided]
        strides = tuple((i, tensors[i].stride()) for i in places)
        call = check(rest, strides, *_sizes(tensors))
        return call, [x if i in places else x.contiguous() for i, x in enumerate(tensors)]

    def on_parts(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any], parts: Sequence[ArraySpec]
    ) -> Call:
        """The call on parts of its tensors."""
        _, rest = self._split(arguments, keywords)
        return self._check_specs(rest, parts)

    def _split(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Sequence[torch.Tensor], _Rest]:
        tensors = arguments[: len(self._tensors)]
        # The dispatcher omits trailing arguments that are None, the only default that those before
        # the keyword-only ones have here; of these it omits all that have their default.
        others = (*arguments[len(tensors) :], *self._nones[len(arguments) :])
        given: tuple[str, ...] = ()
        options: tuple[tuple[str, Any], ...] = ()
        if keywords:
            given = tuple(x for x in self._optional_tensors if keywords.get(x) is not None)
            tensors = (*tensors, *(keywords[name] for name in given))
            options = tuple(x for x in keywords.items() if x[0] not in self._optional_tensors)
        _refuse_grad(self._name, tensors)
        return tensors, (others, given, options)

    def _check_sizes(
        self, rest: _Rest, strides: tuple[tuple[int, tuple[int, ...]], ...], *sizes: Any
    ) -> Call:
        specs = list(map(array_spec, sizes[::2], sizes[1::2]))
        for i, stride in strides:
            specs[i] = specs[i]._replace(strides=stride)
        return self._check_specs(rest, specs)

    def _check_specs(self, rest: _Rest, specs: Sequence[ArraySpec]) -> Call:
        others, given, options = rest
        count = len(self._tensors)
        optional = dict(zip(given, specs[count:], strict=True))
        return self._check(*specs[:count], *others, **optional, **dict(options))


IN_PROGRAMS: dict[str, CheckedCalls] = {}
"""Of each operator that a compiler finds in a program for the CPU or CUDA, by its name."""

_Rest = tuple[tuple[Any, ...], tuple[str, ...], tuple[tuple[str, Any], ...]]
"""Of a call's arguments: those after the positional tensors; the names of the optional tensors that
it has; its other keyword arguments."""


def _sizes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [x for tensor in tensors for x in (tensor.shape, tensor.dtype)]


def define(
    schema: str, check: Callable[..., Call], strided: Sequence[str] = ()
) -> torch._ops.OpOverload:
    """Defines ``xla_gpu::<schema>`` for CPU, XLA and fake tensors.

    Args:
        schema: name, arguments and results as torch.library writes them; the tensors come first,
            and the one that the op writes in place, if there is one, before the others.
        check: the op's check in shared_ffi; takes ArraySpecs for the tensors, then the rest.
        strided: tensors that the CPU and CUDA kernels take as they lie in memory; of others that
            are not contiguous, they are given a copy.
    """
    _LIBRARY.define(schema)
    name, _, signature = schema.partition("(")
    packet, _, overload = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.xla_gpu, packet), overload or "default")
    calls = CheckedCalls(op._schema, check, strided)
    if op._schema.is_mutable:
        _implement_in_place(op, name, signature, calls)
    else:
        _implement(op, name, calls)
    return op


def define_composite(schema: str, function: Callable[..., Any]) -> torch._ops.OpOverload:
    """Defines ``xla_gpu::<schema>`` in terms of other operators, for every device and compiler."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    op: torch._ops.OpOverload = getattr(torch.ops.xla_gpu, name).default
    return op


def _implement(op: torch._ops.OpOverload, name: str, calls: CheckedCalls) -> None:
    def cpu(*arguments: Any, **keywords: Any) -> Any:
        call, tensors = calls.in_memory(arguments, keywords)
        results = allocate(call.results, tensors[0])
        _run_on_cpu(call, tensors, results)
        return as_returned(results)

    def cuda(*arguments: Any, **keywords: Any) -> Any:
        call, tensors = calls.in_memory(arguments, keywords)
        results = allocate(call.results_on("cuda"), tensors[0])
        _run_on_cuda(call, tensors, results)
        return as_returned(results[: len(call.results)])

    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    IN_PROGRAMS[f"xla_gpu::{name}"] = calls
    _implement_on_xla(op, name, calls)


def _implement_in_place(
    op: torch._ops.OpOverload, name: str, signature: str, calls: CheckedCalls
) -> None:
    """The op becomes a composite of two private ones, so that each compiler gets what it can keep
    in place: a mutable op on the CPU, which Inductor knows how to run without a copy; on XLA, whose
    tensors are values, a functional op whose results are assigned to the operands."""
    mutable_name, functional_name = f"_{name}_mutable", f"_{name}_functional"
    _LIBRARY.define(f"{mutable_name}({signature}")
    of_values = re.sub(r"\(.!\)", "", signature).replace("()", "Tensor[]")
    _LIBRARY.define(f"{functional_name}({of_values}")
    mutable = getattr(torch.ops.xla_gpu, mutable_name).default
    functional = getattr(torch.ops.xla_gpu, functional_name).default

    names = [x.name for x in op._schema.arguments]
    written = [x.name for x in op._schema.arguments if x.alias_info is not None]

    def composite(*arguments: Any, **keywords: Any) -> None:
        if arguments[0].device.type == "xla":
            xla(*arguments, **keywords)
        else:
            mutable(*arguments, **keywords)

    def xla(*arguments: Any, **keywords: Any) -> None:
        by_name = dict(zip(names, arguments, strict=False)) | keywords
        targets = [by_name[x] for x in written if by_name.get(x) is not None]
        for target, result in zip(targets, functional(*arguments, **keywords), strict=True):
            target.copy_(result)

    def cpu(*arguments: Any, **keywords: Any) -> None:
        call, tensors = calls.in_memory(arguments, keywords)
        _run_on_cpu(call, tensors, [tensors[operand] for operand, _ in call.aliases])

    def cuda(*arguments: Any, **keywords: Any) -> None:
        call, tensors = calls.in_memory(arguments, keywords)
        _run_on_cuda(call, tensors, [tensors[operand] for operand, _ in call.aliases])

    def fake(*arguments: Any, **keywords: Any) -> None:
        calls.symbolic(arguments, keywords)

    _LIBRARY.impl(name, composite, "CompositeImplicitAutograd")
    _LIBRARY.impl(mutable_name, cpu, "CPU")
    _LIBRARY.impl(mutable_name, cuda, "CUDA")
    # Reached by a graph that was exported on the CPU and moved to an XLA device.
    _LIBRARY.impl(mutable_name, xla, "XLA")
    torch.library.register_fake(f"xla_gpu::{mutable_name}", fake, lib=_LIBRARY)
    IN_PROGRAMS[f"xla_gpu::{mutable_name}"] = calls
    _implement_on_xla(functional, functional_name, calls)


def _implement_on_xla(op: torch._ops.OpOverload, name: str, calls: CheckedCalls) -> None:
    returns_list = str(op._schema.returns[0].type) == "List[Tensor]"

    def xla(*arguments: Any, **keywords: Any) -> Any:
        from torch_frontend import xla as door  # noqa: PLC0415  (needs torch_xla and JAX)

        call_on = partial(calls.on_parts, arguments, keywords)
        results = door.run(*calls(arguments, keywords), call_on)
        return results if returns_list else as_returned(results)

    def fake(*arguments: Any, **keywords: Any) -> Any:
        call, tensors = calls.symbolic(arguments, keywords)
        results = allocate(call.results, tensors[0])
        return results if returns_list else as_returned(results)

    def autograd(*arguments: Any, **keywords: Any) -> Any:
        calls(arguments, keywords)  # refuses; the kernel sees tensors that require no grad
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments, **keywords)

    _LIBRARY.impl(name, xla, "XLA")
    _LIBRARY.impl(name, autograd, "AutogradXLA")
    torch.library.register_fake(f"xla_gpu::{name}", fake, lib=_LIBRARY)


def allocate(specs: Sequence[ArraySpec], like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors for the results of a call."""
    return [like.new_empty(spec.shape, dtype=_DTYPES[spec.dtype]) for spec in specs]


def as_returned(results: Sequence[torch.Tensor]) -> Any:
    """The results as an op returns them."""
    return results[0] if len(results) == 1 else tuple(results)


def _run_on_cpu(
    call: Call, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    eager.run_on_cpu(call, _addresses(tensors), _addresses(results), torch.get_num_threads())


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
    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        eager.run_on_cuda(call, _addresses(tensors), _addresses(results), stream)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _refuse_grad(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            f"{name}: inference only, it has no derivative; got an operand that requires grad. "
            "Call it under torch.inference_mode() or torch.no_grad(), or detach() the operand"
        )


def array_spec(shape: torch.Size, dtype: torch.dtype) -> ArraySpec:
    """A tensor's shape and dtype in the terms of shared_ffi."""
    return ArraySpec(tuple(shape), _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch."))
