"""Defines ops of the namespace ``xla_gpu``: an op's kernels follow from its schema and check."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from shared_ffi._native import Untraced
from shared_ffi.spec import NO_OVERLAP, Call, value_error
from torch_frontend.operator import dtensor, errors
from torch_frontend.operator.arguments import (
    ArgumentReader,
    TensorArguments,
    allocate,
    array_spec,
    as_returned,
    refuse_several_devices,
    specs,
)
from torch_frontend.operator.eager import RULES, Eager, check_fits, check_out, share_elements

_LIBRARY = torch.library.Library("xla_gpu", "DEF")

_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)

Derivative = Callable[[TensorArguments], Any]
"""Makes a call whose results have a derivative."""


class Operator:
    """The kernels of one operator of PyTorch.

    Args:
        op: the op's name in messages; `overload` may be a private part of the op.
        overload: the operator.
        check: see define().
        strided: see define().
        rows: see define().
        derivative: see define().
    """

    def __init__(
        self,
        op: str,
        overload: torch._ops.OpOverload,
        check: Callable[..., Call],
        strided: Sequence[str],
        rows: Sequence[str],
        derivative: Derivative | None,
    ) -> None:
        self._op = op
        self.derivative = derivative
        self._overload = overload
        self._reader = ArgumentReader(op, overload._schema, check)
        dtensor.READERS[overload.name()] = self._reader
        self._returns_list = [str(x.type) for x in overload._schema.returns] == ["List[Tensor]"]
        self.eager = Eager(op, self._reader, strided, rows)

    def read(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> TensorArguments:
        """A call's arguments by name. Refuses tensors that have a derivative."""
        bound = self._reader.read(arguments, keywords)
        RULES.refuse_derivative(self._op, bound.tensors)
        return bound

    def run_on_xla(self, *arguments: Any, **keywords: Any) -> Any:
        """The kernel for torch_xla's tensors, which are values: nothing is written in place."""
        from torch_frontend.operator import xla  # noqa: PLC0415  (needs torch_xla and JAX)

        bound = self.read(arguments, keywords)
        return self._returned(xla.run(bound.checked(), bound.tensors))

    def fake(self, *arguments: Any, **keywords: Any) -> Any:
        """The results' shapes and dtypes; sizes may be symbols."""
        bound = self.read(arguments, keywords)
        call = bound.on(specs(bound.tensors))
        return self._returned(allocate(call.results, bound.tensors[0]))

    def fake_in_place(
        self, *arguments: Any, out: torch.Tensor | None = None, **keywords: Any
    ) -> None:
        """Checks the call; there are no new results."""
        bound = self.read(arguments, keywords)
        call = bound.on(specs(bound.tensors))
        tensors = dict(zip(bound.names, bound.tensors, strict=True))
        written = [bound.names[operand] for operand, _ in call.aliases] if out is None else []
        _refuse_one_memory(self._op, tensors, written, _in_storage)
        if out is not None:
            check_out(call, bound.tensors[0], out)
            RULES.refuse_derivative(self._op, (out,))

    def run_without_grad(self, keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """The autograd kernel for wrapped tensors (torch_xla, torch.func, DTensor): refuses
        derivatives, then runs the op below autograd, where wrappers have none."""
        dtensor.register(_LIBRARY)
        self.read(arguments, {name: x for name, x in keywords.items() if name != "out"})
        return self._below_autograd(arguments, keywords)

    def run_without_grad_on_xla(self, keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """The autograd kernel for torch_xla's tensors. Where a program and its derivative are
        traced, the derivative's program refuses, not the trace: torch_xla's scan() traces both,
        under torch.no_grad(), too."""
        bound = self._reader.read(arguments, keywords)
        if not any(x.requires_grad and is_fake(x) for x in bound.tensors):
            return self.run_without_grad(keys, *arguments, **keywords)

        def run() -> Any:
            return self._below_autograd(arguments, keywords)

        return _RefusedLater.apply(self._op, run, *bound.tensors)

    def differentiate(self, keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """The autograd kernel of an op that has a derivative, in reverse mode and by torch.autograd
        alone."""
        dtensor.register(_LIBRARY)
        bound = self._reader.read(arguments, keywords)
        with torch.no_grad():
            RULES.refuse_derivative(self._op, bound.tensors)  # a tangent
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in bound.tensors):
            return self._below_autograd(arguments, keywords)
        if any(map(torch._C._functorch.is_gradtrackingtensor, bound.tensors)):
            raise errors.derivative_error(self._op, "torch.func differentiates")
        assert self.derivative is not None
        return self.derivative(bound)

    def autocast(self, device: str, names: Sequence[str], *arguments: Any, **keywords: Any) -> Any:
        """The kernel under torch.autocast: these tensors get its dtype, as those of PyTorch's
        scaled_dot_product_attention do."""
        dtype = torch.get_autocast_dtype(device.lower())
        schema = self._overload._schema.arguments
        cast = [
            x.to(dtype) if argument.name in names and x.dtype in _AUTOCAST else x
            for argument, x in zip(schema, arguments, strict=False)
        ]
        key = getattr(torch._C.DispatchKey, f"Autocast{device}")
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return self._overload(*cast, **keywords)

    def vmap(self, keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """The kernel of an op that has a derivative for tensors under torch.func.vmap, or under
        is_grads_batched."""
        from torch_frontend.operator import vmap  # noqa: PLC0415  (takes long to import)

        is_func = keys.has(torch._C.DispatchKey.FuncTorchBatched)
        batch = vmap.batch if is_func else vmap.batch_gradients
        bound = self._reader.read(arguments, keywords)
        bound.on(specs(bound.tensors))  # refuses one call's shapes, not those of all
        return batch(self._overload, bound)

    def _below_autograd(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self._overload(*arguments, **keywords)

    def _returned(self, results: list[torch.Tensor]) -> Any:
        return results if self._returns_list else as_returned(results)


class _RefusedLater(torch.autograd.Function):
    """A traced call. Its derivative is traced as the operator xla_gpu::_derivative, which refuses
    when it runs."""

    @staticmethod
    def forward(ctx: Any, op: str, run: Callable[[], Any], *tensors: torch.Tensor) -> Any:
        ctx.op, ctx.operands = op, specs(tensors)
        results = run()
        return (*results,) if isinstance(results, list) else results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        needed = zip(ctx.operands, ctx.needs_input_grad[2:], strict=True)
        derivative = torch.ops.xla_gpu._derivative
        operands = (derivative(grads[0], ctx.op, x.shape) if yes else None for x, yes in needed)
        return (None, None, *operands)


COMPILED_OPS: dict[str, Operator] = {}
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
    ) -> None:
        self._mutable = mutable
        self._functional = functional
        self._name = schema.name.removeprefix("xla_gpu::")
        self._names = [x.name for x in schema.arguments]
        self._written_names = [x.name for x in schema.arguments if x.alias_info is not None]
        self._has_out = "out" in self._names

    def run(self, keys: Any, *arguments: Any, **keywords: Any) -> Any:
        """The composite kernel for every device. `keys`: the call's DispatchKeySet, unused."""
        first = arguments[0]
        if first is None:
            raise errors.missing_error(self._name, self._names[0])
        tensors = self._tensors(arguments, keywords)
        refuse_several_devices(self._name, (*tensors,), (*tensors.values(),))
        for name, tensor in self._targets(tensors).items():
            if tensor.is_neg():
                rule = "not be a lazily negated view, as it is written to"
                remedy = f"Pass {name}.resolve_neg(), and keep it"
                raise value_error(self._name, name, rule, "one", remedy)
        if first.device.type == "xla":
            self.run_on_xla(*arguments, **keywords)
        else:
            self._mutable(*arguments, **keywords)
        return keywords.get("out")

    def run_on_xla(self, *arguments: Any, **keywords: Any) -> None:
        """The kernel for torch_xla's tensors, which have neither addresses nor strides of their
        own."""
        tensors = self._tensors(arguments, keywords)
        targets = self._targets(tensors)
        for name, target in targets.items():
            base = target._base
            if base is not None and base.numel() < target.numel():
                got = f"a view of {base.numel()} elements as {target.numel()}"
                raise value_error(self._name, name, NO_OVERLAP, got, "Make it without expand")
        if self._has_out:
            keywords.pop("out")
        else:
            _refuse_one_memory(self._name, tensors, [*targets], _in_base)
        results = self._functional(*arguments, **keywords)
        if self._has_out:
            results = [results]
        for (name, target), result in zip(targets.items(), results, strict=True):
            # copy_ would broadcast and convert.
            check_fits(self._name, name, array_spec(result.shape, result.dtype), target)
            target.copy_(result)

    def _tensors(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The tensors of a call by name."""
        named = dict(zip(self._names, arguments, strict=False)) | dict(keywords)
        return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}

    def _targets(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to write to by name."""
        return {name: tensors[name] for name in self._written_names if name in tensors}


_Place = tuple[object, Callable[[], torch.Tensor]]
"""The memory that a tensor lies in, and a function for a tensor that lies in the same way."""


def _refuse_one_memory(
    op: str,
    tensors: Mapping[str, torch.Tensor],
    written: Sequence[str],
    place: Callable[[torch.Tensor], _Place],
) -> None:
    """Refuses a tensor to write to that shares elements with another one, as TorchRules does by
    addresses."""
    places = {name: place(x) for name, x in tensors.items()}
    for i, name in enumerate(written):
        memory, view = places[name]
        for other in (x for x in places if x not in written[i:]):
            other_memory, other_view = places[other]
            if memory == other_memory and share_elements(view(), other_view()):
                raise errors.one_memory_error(op, name, other)


def _in_storage(tensor: torch.Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, lambda: tensor


def _in_base(tensor: torch.Tensor) -> _Place:
    """The place of a torch_xla tensor, which is a value: where a view of memory would lie."""
    base = tensor if tensor._base is None else tensor._base

    def view() -> torch.Tensor:
        like = torch.empty(base.shape, dtype=base.dtype, device="meta")
        return like if base is tensor else tensor._view_func_unsafe(like)

    return id(base), view


def define(
    schema: str,
    check: Callable[..., Call],
    strided: Sequence[str] = (),
    rows: Sequence[str] = (),
    derivative: Derivative | None = None,
    autocast: Sequence[str] = (),
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
        derivative: None: the op refuses tensors that have one.
        autocast: names of the tensors that torch.autocast converts.
    """
    name, _, signature = schema.partition("(")
    overload = _defined(schema)

    def make(overload: torch._ops.OpOverload) -> Operator:
        return Operator(name.partition(".")[0], overload, check, strided, rows, derivative)

    if overload._schema.is_mutable:
        _implement_in_place(overload, name, signature, make)
    else:
        operator = make(overload)
        _implement_eagerly(name, operator)
        _implement_on_xla(name, operator)
        if derivative is not None:
            _LIBRARY.impl(name, Untraced(operator.differentiate), "Autograd", with_keyset=True)
            for key in ("Batched", "FuncTorchBatched"):
                _LIBRARY.impl(name, Untraced(operator.vmap), key, with_keyset=True)
        for device in ("CPU", "CUDA", "XLA") if autocast else ():
            cast = Untraced(partial(operator.autocast, device, autocast))
            _LIBRARY.impl(name, cast, f"Autocast{device}")
    dtensor.register(_LIBRARY)
    return overload


def define_composite(schema: str, function: Callable[..., Any]) -> torch._ops.OpOverload:
    """Defines ``xla_gpu::<schema>`` in terms of other operators, for every device and compiler."""
    overload = _defined(schema)
    _LIBRARY.impl(schema.partition("(")[0], Untraced(function), "CompositeImplicitAutograd")
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
    if overload_name == "out":
        functional = getattr(torch.ops.xla_gpu, packet).default
    else:
        values = re.sub(r"\(.!\)", "", arguments)
        functional_name = "_".join(filter(None, ("", packet, overload_name, "functional")))
        functional = _defined(f"{functional_name}({values} -> Tensor[]")
        _implement_on_xla(functional_name, make(functional))
    operator = make(mutable)
    _implement_eagerly(mutable_name, operator)
    op = InPlaceOp(overload._schema, mutable, functional)
    # A call goes to the kernel for the CPU, else to that for CUDA, else to op.run.
    returns_out = overload_name == "out"
    kernel = partial(operator.eager.kernel, returns_out=returns_out)
    on_cuda = kernel("cuda", _direct_keys("CUDA"), Untraced(op.run))
    on_cpu = kernel("cpu", _direct_keys("CPU"), on_cuda)
    _LIBRARY.impl(name, on_cpu, "CompositeImplicitAutograd", with_keyset=True)
    # Reached by a graph that was exported on the CPU and moved to an XLA device.
    _LIBRARY.impl(mutable_name, Untraced(op.run_on_xla), "XLA")
    _fake(mutable_name, operator.fake_in_place)


def _implement_eagerly(name: str, operator: Operator) -> None:
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, operator.eager.kernel(device.lower()), device)
        if operator.derivative is None:
            keys = _direct_keys(device)
            refuse = Untraced(operator.run_without_grad)
            with_autograd = operator.eager.kernel(device.lower(), keys, refuse)
            _LIBRARY.impl(name, with_autograd, f"Autograd{device}", with_keyset=True)
    COMPILED_OPS[f"xla_gpu::{name}"] = operator


def _direct_keys(device: str) -> list[int]:
    """The raw DispatchKeySets of calls that need no other dispatch step than a kernel for this
    device: without autograd and with it."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
    autograd = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{device}"))
    return [keys.raw_repr(), (keys | autograd).raw_repr()]


def _implement_on_xla(name: str, operator: Operator) -> None:
    _LIBRARY.impl(name, Untraced(operator.run_on_xla), "XLA")
    if operator.derivative is None:
        _LIBRARY.impl(
            name, Untraced(operator.run_without_grad_on_xla), "AutogradXLA", with_keyset=True
        )
    _fake(name, operator.fake)


def _fake(name: str, function: Callable[..., Any]) -> None:
    torch.library.register_fake(f"xla_gpu::{name}", Untraced(function), lib=_LIBRARY)


def _fake_derivative(grad: torch.Tensor, op: str, shape: Sequence[int]) -> torch.Tensor:
    return grad.new_empty(shape, dtype=torch.float32)


def _derivative_on_xla(grad: torch.Tensor, op: str, shape: Sequence[int]) -> torch.Tensor:
    from torch_frontend.operator import xla  # noqa: PLC0415  (needs torch_xla and JAX)

    return xla.fail(str(errors.derivative_error(op, "requires grad")), grad, shape)


_defined("_derivative(Tensor grad, str op, SymInt[] shape) -> Tensor")
_LIBRARY.impl("_derivative", Untraced(_derivative_on_xla), "XLA")
_fake("_derivative", _fake_derivative)
