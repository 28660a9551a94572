"""Defines ops of the namespace ``xla_gpu``: an op's kernels follow from its schema and check."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from shared_ffi import eager, token_rows
from shared_ffi.eager import RememberedCalls
from shared_ffi.spec import (
    PLACE_FOR_EACH,
    ArraySpec,
    Call,
    dtype_error,
    missing_error,
    shape_error,
    value_error,
)

_LIBRARY = torch.library.Library("xla_gpu", "DEF")
_OUT = "out"
_DEVICE, _SHAPE, _DTYPE = map(attrgetter, ("device", "shape", "dtype"))


_is_contiguous = torch.Tensor.is_contiguous
_data_ptr = torch.Tensor.data_ptr


class _Torch:
    """What RememberedCalls asks of PyTorch."""

    tensor_type = torch.Tensor
    is_grad_enabled = torch.is_grad_enabled
    is_inference_mode_enabled = torch.is_inference_mode_enabled
    get_num_threads = torch.get_num_threads
    increment_version = torch._C._increment_version  # of each tensor of a list
    forward_ad = forward_ad


class Remembered(NamedTuple):
    """A checked call on CPU tensors that the handler takes as they lie."""

    call: eager.EagerCall
    spans: list[int]
    """The bytes from the first to the last element of each tensor."""
    out_bytes: int
    """The size of the tensor ``out``; 0: there is none."""
    written: list[int]
    """The numbers of the tensors that are written to in place."""
    new_results: list[tuple[tuple[int, ...], torch.dtype]]
    """Shapes and dtypes of the results that have no tensor yet."""
    returns_out: bool


class Arguments(NamedTuple):
    """The arguments of a call by their names in the schema, without the tensors themselves."""

    check: Callable[..., Call]
    tensor_names: tuple[str, ...]
    """In the order of the call's operands."""
    option_names: tuple[str, ...]
    """All other arguments, except for those that the dispatcher omits: they have their default."""
    option_values: tuple[Any, ...]
    strides: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """By name, the strides of tensors that the handler takes though they are not contiguous."""

    def call_on(self, specs: Sequence[ArraySpec]) -> Call:
        """Returns the checked call on tensors of these shapes and dtypes, or on a device's parts of
        them. Sizes may be symbols."""
        arrays = dict(zip(self.tensor_names, specs, strict=True))
        for name, strides in self.strides:
            arrays[name] = arrays[name]._replace(strides=strides)
        options = dict(zip(self.option_names, self.option_values, strict=True))
        return self.check(**arrays, **options)


class Operator:
    """The kernels of one operator of PyTorch.

    Args:
        name: of the op in messages; `overload` may be a private part of the op.
        overload: the operator. Its schema has the tensors first; optional ones are keyword-only.
        check: see define().
        strided: see define().
        rows: see define().
    """

    def __init__(
        self,
        name: str,
        overload: torch._ops.OpOverload,
        check: Callable[..., Call],
        strided: Sequence[str],
        rows: Sequence[str],
    ) -> None:
        schema = overload._schema
        self._name = name
        self._overload = overload
        self._check = check
        self._strided = strided
        self._rows = rows
        positional = [x for x in schema.arguments if not x.kwarg_only]
        self._tensor_names = tuple(x.name for x in positional if str(x.type) == "Tensor")
        self._option_names = tuple(x.name for x in positional if str(x.type) != "Tensor")
        self._optional_tensor_names = [
            x.name for x in schema.arguments if str(x.type) == "Optional[Tensor]"
        ]
        self._returns_list = [str(x.type) for x in schema.returns] == ["List[Tensor]"]
        self._splits: dict[tuple[Any, ...], tuple[tuple[str, ...], ...]] = {}

    def bind(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[Arguments, tuple[torch.Tensor, ...]]:
        """Returns a call's arguments by name, and its tensors; refuses those that have a derivative
        or are on several devices."""
        count = len(self._tensor_names)
        names, tensors, values = self._tensor_names, arguments[:count], arguments[count:]
        option_names = self._option_names[: len(values)]
        if keywords:
            given, others = self._split(keywords)
            names += given
            tensors += tuple([keywords[name] for name in given])
            option_names += others
            values += tuple([keywords[name] for name in others])
        _refuse_several_devices(self._name, names, tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise _no_derivative(self._name, "requires grad")
        # Outside of forward-mode differentiation the level is -1.
        if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
            raise _no_derivative(self._name, "has a tangent")
        return Arguments(self._check, names, option_names, values), tensors

    def _split(self, keywords: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
        """The names of the keyword arguments that are tensors, in the schema's order, and of the
        others. The same names come again and again."""
        key = (*keywords,)
        if key not in self._splits:
            given = tuple([x for x in self._optional_tensor_names if x in keywords])
            self._splits[key] = given, tuple([x for x in keywords if x not in given])
        given, others = self._splits[key]
        for name in given:
            if keywords[name] is None:
                given = tuple([x for x in given if keywords[x] is not None])
                return given, tuple([x for x in keywords if x not in given])
        return given, others

    def bind_in_memory(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, takes_rows: bool = True
    ) -> tuple[Arguments, tuple[torch.Tensor, ...]]:
        """The same for handlers, which take addresses: each tensor is contiguous, `strided`, or one
        of `rows` that may be strided unless `takes_rows` is False. Others are copied."""
        bound, tensors = self.bind(arguments, keywords)
        if all(map(_is_contiguous, tensors)):
            return bound, tensors
        placed, strides = list(tensors), []
        for i, (name, tensor) in enumerate(zip(bound.tensor_names, tensors, strict=True)):
            if tensor.is_contiguous():
                continue
            if name in self._strided or (takes_rows and name in self._rows and _are_rows(tensor)):
                strides.append((name, tensor.stride()))
            else:
                placed[i] = tensor.contiguous()
        return bound._replace(strides=tuple(strides)), tuple(placed)

    def run_on_cpu(self, *arguments: Any, out: torch.Tensor | None = None, **keywords: Any) -> Any:
        """The kernel for CPU tensors. Writes to `out` if it is given."""
        bound, tensors = self.bind_in_memory(arguments, keywords)
        call = _checked(bound, *_sizes(tensors))
        results = _results(call, call.results, bound.tensor_names, tensors, out)
        eager.run_on_cpu(call, _addresses(tensors), _addresses(results), torch.get_num_threads())
        return None if call.aliases or out is not None else as_returned(results)

    def remember_on_cpu(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], *, returns_out: bool
    ) -> Remembered | None:
        """What `run_on_cpu` has found out about a call that has succeeded, but for what differs
        from call to call. None: it has copied a tensor.

        Args:
            arguments: as `run_on_cpu` takes them.
            keywords: likewise, with ``out``.
            returns_out: the operator returns ``out``.
        """
        out = keywords.get(_OUT)
        keywords = {name: value for name, value in keywords.items() if name != _OUT}
        bound, tensors = self.bind_in_memory(arguments, keywords)
        given = [x for x in (*arguments, *keywords.values()) if isinstance(x, torch.Tensor)]
        if [*map(id, given)] != [*map(id, tensors)]:
            return None
        call = _checked(bound, *_sizes(tensors))
        new = () if call.aliases else call.results[0 if out is None else 1 :]
        return Remembered(
            eager.prepare_on_cpu(call),
            [*map(_spanned_bytes, tensors)],
            0 if out is None else out.nbytes,
            [operand for operand, _ in call.aliases],
            [(spec.shape, getattr(torch, spec.dtype)) for spec in new],
            returns_out and out is not None,
        )

    def run_on_cuda(self, *arguments: Any, out: torch.Tensor | None = None, **keywords: Any) -> Any:
        """The kernel for CUDA tensors. Queues the call on PyTorch's current stream and waits for
        nothing, so that it can be captured."""
        bound, tensors = self.bind_in_memory(arguments, keywords)
        device = tensors[0].device
        call = _checked(bound, *_sizes(tensors))
        results = _results(call, call.results_on("cuda"), bound.tensor_names, tensors, out)
        with torch.cuda.device(device):
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            eager.run_on_cuda(call, _addresses(tensors), _addresses(results), stream)
        if call.aliases or out is not None:
            return None
        return as_returned(results[: len(call.results)])

    def run_on_xla(self, *arguments: Any, **keywords: Any) -> Any:
        """The kernel for torch_xla's tensors, which are values: nothing is written in place."""
        from torch_frontend import xla as backend  # noqa: PLC0415  (needs torch_xla and JAX)

        bound, tensors = self.bind(arguments, keywords)
        call = _checked(bound, *_sizes(tensors))
        results = backend.run(call, tensors, bound.call_on)
        return results if self._returns_list else as_returned(results)

    def fake(self, *arguments: Any, **keywords: Any) -> Any:
        """The results' shapes and dtypes; sizes may be symbols."""
        bound, tensors = self.bind(arguments, keywords)
        results = allocate(bound.call_on(specs(tensors)).results, tensors[0])
        return results if self._returns_list else as_returned(results)

    def fake_in_place(
        self, *arguments: Any, out: torch.Tensor | None = None, **keywords: Any
    ) -> None:
        """Checks the call; there are no new results."""
        bound, tensors = self.bind(arguments, keywords)
        call = bound.call_on(specs(tensors))
        if out is not None:
            _check_out(call, tensors[0], out)

    def refuse_grad(self, *arguments: Any, **keywords: Any) -> Any:
        """The autograd kernel for tensors that torch_xla or a transformation of torch.func wraps:
        below it, they have no derivatives."""
        self.bind(arguments, keywords)
        with torch._C._AutoDispatchBelowAutograd():
            return self._overload(*arguments, **keywords)

    def with_autograd(self, run: Callable[..., Any], plain: int) -> Callable[..., Any]:
        """The autograd kernel for other tensors, which takes the call's dispatch keys first.

        Args:
            run: the kernel below. It is called directly if nothing is between the two, because a
                second dispatch takes as long as a small op.
            plain: the dispatch keys, as bits, of a call where that is so.
        """

        def kernel(keys: Any, *arguments: Any, **keywords: Any) -> Any:
            if keys.raw_repr() == plain:
                return run(*arguments, **keywords)
            return self.refuse_grad(*arguments, **keywords)

        return kernel

    def remembering(
        self, kernel: Callable[..., Any], plain: Sequence[int] = (), *, returns_out: bool = False
    ) -> RememberedCalls:
        """A kernel for CPU tensors that makes known calls at once, and leaves others to `kernel`.

        Args:
            kernel: its first argument is the call's dispatch keys if there are `plain` ones.
            plain: the dispatch keys, as bits, of a call where nothing is between the operator and
                `run_on_cpu`. The dispatcher chooses them if all tensors are on the CPU.
            returns_out: see `remember_on_cpu`.
        """
        prepare = partial(self.remember_on_cpu, returns_out=returns_out)
        return RememberedCalls(_Torch, kernel, prepare, plain)


IN_PROGRAMS: dict[str, Operator] = {}
"""By its name, each operator that a compiler finds in a program for the CPU or CUDA."""


class InPlaceOp:
    """An op that writes to tensors of its caller: a composite of two operators, so that each
    compiler gets what it can keep in place. The mutable one is for the CPU and CUDA: Inductor runs
    it without a copy. The functional one is for XLA, whose tensors are values: its results are
    assigned to the caller's tensors."""

    def __init__(
        self,
        schema: torch.FunctionSchema,
        mutable: torch._ops.OpOverload,
        functional: torch._ops.OpOverload,
        kernels: Mapping[int, Callable[..., Any]],
    ) -> None:
        """`kernels`: those of `mutable`, by the dispatch keys, as bits, of a call where nothing is
        between this kernel and them."""
        self._kernels = kernels
        self._mutable = mutable
        self._functional = functional
        self._name = schema.name.removeprefix("xla_gpu::")
        self._names = [x.name for x in schema.arguments]
        self._written_names = [x.name for x in schema.arguments if x.alias_info is not None]
        self._has_out = _OUT in self._names

    def run(self, keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """The kernel for all tensors, which takes the call's dispatch keys first."""
        kernel = self._kernels.get(keys.raw_repr())
        if kernel is not None:
            kernel(*arguments, **keywords)
            return keywords.get(_OUT)
        first = arguments[0]
        if first is None:
            raise missing_error(self._name, self._names[0])
        named = dict(zip(self._names, arguments, strict=False)) | dict(keywords)
        tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
        _refuse_several_devices(self._name, (*tensors,), (*tensors.values(),))
        for name, tensor in self._targets(arguments, keywords).items():
            if tensor.is_neg():
                rule = "not be a lazily negated view, as it is written to"
                raise value_error(self._name, name, rule, "one (call resolve_neg)")
        if first.device.type == "xla":
            self.run_on_xla(*arguments, **keywords)
        else:
            self._mutable(*arguments, **keywords)
        return keywords.get(_OUT)

    def run_on_xla(self, *arguments: Any, **keywords: Any) -> None:
        """The kernel for torch_xla's tensors, which have neither addresses nor strides of their
        own."""
        targets = self._targets(arguments, keywords)
        for name, target in targets.items():
            base = target._base
            if base is not None and base.numel() < target.numel():
                got = f"a view of {base.numel()} elements as {target.numel()}"
                raise value_error(self._name, name, PLACE_FOR_EACH, got)
        if len(targets) == 2:
            (first_name, first), (name, second) = targets.items()
            if first is second:
                raise _one_memory(self._name, name, first_name)
        if self._has_out:
            keywords.pop(_OUT)
        results = self._functional(*arguments, **keywords)
        if self._has_out:
            results = [results]
        for (name, target), result in zip(targets.items(), results, strict=True):
            # copy_ would broadcast and convert.
            _check_fits(self._name, name, array_spec(result.shape, result.dtype), target)
            target.copy_(result)

    def _targets(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The tensors to write to by name."""
        named = dict(zip(self._names, arguments, strict=False)) | dict(keywords)
        return {name: named[name] for name in self._written_names if named.get(name) is not None}


def define(
    schema: str,
    check: Callable[..., Call],
    strided: Sequence[str] = (),
    rows: Sequence[str] = (),
) -> torch._ops.OpOverload:
    """Defines ``xla_gpu::<schema>`` for CPU, CUDA, XLA and fake tensors.

    Args:
        schema: name, arguments and results as torch.library writes them. The tensors come first;
            optional ones are keyword-only. What the op writes in place is marked ``(a!)``. With an
            argument ``out``, the op writes its result there, and is the op ``.default`` otherwise.
        check: the op's check in shared_ffi; it takes all arguments under their names in the schema,
            an ArraySpec for each tensor.
        strided: names of the tensors that may be strided views on the CPU and CUDA; others are
            copied if they are not contiguous.
        rows: names of the tensors whose tokens may be any distance apart there.
    """
    name, _, signature = schema.partition("(")
    overload = _defined(schema)
    make = partial(Operator, name.partition(".")[0], check=check, strided=strided, rows=rows)
    if overload._schema.is_mutable:
        _implement_in_place(overload, name, signature, make)
        return overload
    operator = make(overload)
    _implement_eagerly(name, operator)
    IN_PROGRAMS[f"xla_gpu::{name}"] = operator
    _implement_on_xla(name, operator)
    return overload


def define_composite(schema: str, function: Callable[..., Any]) -> torch._ops.OpOverload:
    """Defines ``xla_gpu::<schema>`` in terms of other operators, for every device and compiler."""
    overload = _defined(schema)
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    return overload


def _defined(schema: str) -> torch._ops.OpOverload:
    _LIBRARY.define(schema)
    packet, _, overload = schema.partition("(")[0].partition(".")
    return getattr(getattr(torch.ops.xla_gpu, packet), overload or "default")


def _implement_in_place(
    overload: torch._ops.OpOverload,
    name: str,
    signature: str,
    make: Callable[[torch._ops.OpOverload], Operator],
) -> None:
    packet, _, overload_name = name.partition(".")
    mutable_name = f"_{packet}_{overload_name or 'mutable'}"
    arguments = signature.partition(" -> ")[0]
    mutable = _defined(f"{mutable_name}({arguments} -> ()")
    if overload_name == _OUT:
        functional = getattr(torch.ops.xla_gpu, packet).default
    else:
        of_values = re.sub(r"\(.!\)", "", arguments)
        functional_name = f"_{packet}_functional"
        functional = _defined(f"{functional_name}({of_values} -> Tensor[]")
        _implement_on_xla(functional_name, make(functional))
    operator = make(mutable)
    kernels = _implement_eagerly(mutable_name, operator)
    op = InPlaceOp(overload._schema, mutable, functional, kernels)
    on_cpu = [keys for keys, kernel in kernels.items() if kernel == operator.run_on_cpu]
    run = operator.remembering(op.run, on_cpu, returns_out=overload_name == _OUT)
    _LIBRARY.impl(name, run, "CompositeImplicitAutograd", with_keyset=True)
    # Reached by a graph that was exported on the CPU and moved to an XLA device.
    _LIBRARY.impl(mutable_name, op.run_on_xla, "XLA")
    torch.library.register_fake(f"xla_gpu::{mutable_name}", operator.fake_in_place, lib=_LIBRARY)
    IN_PROGRAMS[f"xla_gpu::{mutable_name}"] = operator


def _implement_eagerly(name: str, operator: Operator) -> dict[int, Callable[..., Any]]:
    """Implements an operator for CPU and CUDA. Returns the kernels by the dispatch keys, as bits,
    of a call where nothing is between the operator and them, with autograd and without."""
    kernels: dict[int, Callable[..., Any]] = {}
    for device, run in (("CPU", operator.run_on_cpu), ("CUDA", operator.run_on_cuda)):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
        autograd = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{device}"))
        plain = (keys | autograd).raw_repr()
        kernels |= {keys.raw_repr(): run, plain: run}
        with_autograd = operator.with_autograd(run, plain)
        if device == "CPU":
            run = operator.remembering(run)
            with_autograd = operator.remembering(with_autograd, [plain])
        _LIBRARY.impl(name, run, device)
        _LIBRARY.impl(name, with_autograd, f"Autograd{device}", with_keyset=True)
    return kernels


def _implement_on_xla(name: str, operator: Operator) -> None:
    _LIBRARY.impl(name, operator.run_on_xla, "XLA")
    _LIBRARY.impl(name, operator.refuse_grad, "AutogradXLA")
    torch.library.register_fake(f"xla_gpu::{name}", operator.fake, lib=_LIBRARY)


@lru_cache(maxsize=4096)
def _checked(arguments: Arguments, *sizes: Any) -> Call:
    """The checked call, given the tensors' shapes, then their dtypes, which repeat from call to
    call. Symbols cannot be cached by value: with them, use ``Arguments.call_on``."""
    count = len(arguments.tensor_names)
    return arguments.call_on([*map(array_spec, sizes[:count], sizes[count:])])


def _sizes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [*map(_SHAPE, tensors), *map(_DTYPE, tensors)]


def specs(tensors: Sequence[torch.Tensor]) -> list[ArraySpec]:
    """Shapes and dtypes of tensors, in the terms of shared_ffi."""
    return [array_spec(tensor.shape, tensor.dtype) for tensor in tensors]


def array_spec(shape: torch.Size, dtype: torch.dtype) -> ArraySpec:
    """A tensor's shape and dtype in the terms of shared_ffi, whose dtype names are PyTorch's."""
    return ArraySpec(tuple(shape), str(dtype).removeprefix("torch."))


def allocate(specs: Sequence[ArraySpec], like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors for the results of a call."""
    return [like.new_empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]


def _results(
    call: Call,
    specs: Sequence[ArraySpec],
    tensor_names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    out: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The tensors that a call is about to write: of its caller, or new ones of these specs."""
    if out is not None:
        _check_out(call, tensors[0], out)
        _refuse_overlap(call.op, tensor_names, tensors, out)
        _before_writing(call.op, (_OUT,), (out,))
        return [out, *allocate(specs[1:], tensors[0])]
    if not call.aliases:
        return allocate(specs, tensors[0])
    places = [operand for operand, _ in call.aliases]
    written = [tensors[i] for i in places]
    if len(written) == 2:
        _refuse_one_memory(call.op, [tensor_names[i] for i in places], *written)
    _before_writing(call.op, [tensor_names[i] for i in places], written)
    return written


def _before_writing(op: str, names: Sequence[str], written: Sequence[torch.Tensor]) -> None:
    """By their versions, autograd knows that the former values of tensors are lost. As for
    PyTorch's own operators, an inference tensor is written in inference mode only."""
    if not torch.is_inference_mode_enabled():
        for name, tensor in zip(names, written, strict=True):
            if tensor.is_inference():
                raise RuntimeError(
                    f"{op}: {name} must be a normal tensor outside of torch.inference_mode(); got "
                    "an inference tensor. Call it in inference mode, or clone() the tensor outside "
                    "of it"
                )
    torch.autograd.graph.increment_version(written)


def _check_out(call: Call, like: torch.Tensor, out: torch.Tensor) -> None:
    _check_fits(call.op, _OUT, call.results[0], out)
    if not out.is_contiguous():
        raise value_error(call.op, _OUT, "be contiguous", f"strides {list(out.stride())}")
    _refuse_several_devices(call.op, ("the first tensor", _OUT), (like, out))
    if torch.is_grad_enabled() and out.requires_grad:
        raise _no_derivative(call.op, "requires grad")


def _check_fits(op: str, name: str, result: ArraySpec, target: torch.Tensor) -> None:
    given = array_spec(target.shape, target.dtype)
    if given.shape != result.shape:
        raise shape_error(op, name, str(list(result.shape)), given.shape)
    if given.dtype != result.dtype:
        raise dtype_error(op, name, f"dtype {result.dtype}", given.dtype)


def _refuse_overlap(
    op: str, tensor_names: Sequence[str], tensors: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    begin = out.data_ptr()
    end = begin + out.nbytes
    for name, tensor in zip(tensor_names, tensors, strict=True):
        first = tensor.data_ptr()
        if first < end and begin < first + _spanned_bytes(tensor):
            raise value_error(op, _OUT, "share no memory with an argument", f"memory of {name}")


def _refuse_one_memory(
    op: str, names: Sequence[str], first: torch.Tensor, second: torch.Tensor
) -> None:
    """Other views of one memory are legal: transformers' K and V overlap, and its slots do not."""
    if first.data_ptr() == second.data_ptr() and first.numel():
        raise _one_memory(op, names[1], names[0])


def _one_memory(op: str, name: str, other: str) -> ValueError:
    rule = "begin elsewhere, as both are written to"
    return value_error(op, name, rule, f"the memory of {other}")


def _spanned_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _are_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 3 and token_rows.are_rows(tensor.shape, tensor.stride())


def as_returned(results: Sequence[torch.Tensor]) -> Any:
    """The results as an op returns them."""
    return results[0] if len(results) == 1 else tuple(results)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [*map(_data_ptr, tensors)]


def _refuse_several_devices(
    name: str, tensor_names: Sequence[str], tensors: Sequence[torch.Tensor]
) -> None:
    """One meta tensor would choose the fake kernel, whose results are not computed."""
    try:
        devices = [*map(_DEVICE, tensors)]
    except AttributeError:  # the dispatcher lets None pass for a tensor
        raise missing_error(name, tensor_names[[x is None for x in tensors].index(True)]) from None
    if devices.count(devices[0]) == len(devices):
        return
    for tensor_name, device in zip(tensor_names, devices, strict=True):
        if device != devices[0]:
            raise ValueError(
                f"{name}: all tensors must be on one device; got {tensor_name} on {device} "
                f"beside {tensor_names[0]} on {devices[0]}"
            )


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _no_derivative(name: str, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: inference only, it has no derivative; got an operand that {what}. "
        "Call it under torch.no_grad() or torch.inference_mode(), or detach() the operand"
    )
