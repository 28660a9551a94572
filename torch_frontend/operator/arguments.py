"""From the arguments of a PyTorch call to its check: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from shared_ffi.spec import ArraySpec, Call, dtype_error
from torch_frontend.operator.errors import devices_error, missing_error, tensor_error

_SHAPE, _DTYPE = map(attrgetter, ("shape", "dtype"))


def array_spec(shape: torch.Size, dtype: torch.dtype) -> ArraySpec:
    """A tensor's shape and dtype in the terms of shared_ffi, whose dtype names are PyTorch's."""
    return ArraySpec(tuple(shape), str(dtype).removeprefix("torch."))


def specs(tensors: Sequence[torch.Tensor]) -> list[ArraySpec]:
    """Shapes and dtypes of tensors. Sizes may be symbols."""
    return [array_spec(tensor.shape, tensor.dtype) for tensor in tensors]


def allocate(specs: Sequence[ArraySpec], like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors for the results of a call."""
    return [like.new_empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]


def as_returned(results: Sequence[torch.Tensor]) -> Any:
    """The results as an op returns them."""
    return results[0] if len(results) == 1 else tuple(results)


_ACCEPTED: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "float": (float, int, np.floating, np.integer),
    "int": (int, np.integer, torch.SymInt),
    "bool": (bool,),
    "str": (str,),
}
"""What an argument of a type in the schema may be."""


def checked(op: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    """An operator that checks the types of its arguments first. PyTorch's dispatcher would refuse
    them without naming op and rule.

    Args:
        op: for messages.
        overload: the operator.
    """
    types = {x.name: str(x.type) for x in overload._schema.arguments}
    kinds = {name: x.removeprefix("Optional[").removesuffix("]") for name, x in types.items()}

    def call(*positional: Any, **keywords: Any) -> Any:
        by_place = zip([*kinds][: len(positional)], positional, strict=True)
        for name, value in (*by_place, *keywords.items()):
            kind = kinds[name]
            if value is None and kind != types[name]:  # it is optional
                continue
            if value is None and kind == "Tensor":
                raise missing_error(op, name)
            is_bool = isinstance(value, bool)  # an int to Python
            if kind == "Tensor" and not isinstance(value, torch.Tensor):
                raise tensor_error(op, name, value)
            if not isinstance(value, _ACCEPTED[kind]) or (is_bool and kind != "bool"):
                raise dtype_error(op, name, f"type {kind}", type(value).__name__)
        return overload(*positional, **keywords)

    return call


def scale_tensor(scale: Any, kv_cache: Any) -> Any:
    """A number as a float32 tensor beside the cache; anything else as it is, for `checked`."""
    is_number = isinstance(scale, _ACCEPTED["float"]) and not isinstance(scale, bool)
    if not is_number or not isinstance(kv_cache, torch.Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=kv_cache.device)


def split_causal(causal: Any) -> tuple[Any, torch.Tensor | None]:
    """The arguments ``causal`` and ``causal_seqs`` of an operator, whose schema has no type for a
    bool or a tensor. Other integers, and bools, stand for False if they are 0."""
    if not isinstance(causal, torch.Tensor):
        return causal, None
    if causal.dtype != torch.int32 and not causal.is_floating_point():
        causal = (causal != 0).int()
    return True, causal


def takes_causal_seqs(check: Callable[..., Call]) -> Callable[..., Call]:
    """A check for an operator with an argument ``causal_seqs``."""

    def checked(
        *, causal: bool = True, causal_seqs: ArraySpec | None = None, **others: Any
    ) -> Call:
        return check(causal=causal if causal_seqs is None else causal_seqs, **others)

    return checked


Names = tuple[str, ...]
Options = tuple[tuple[str, Any], ...]


class TensorArguments(NamedTuple):
    """The arguments of a call on tensors, except for those that the dispatcher omits: they have
    their default."""

    tensors: tuple[torch.Tensor, ...]
    """In the order of the call's operands."""
    names: Names
    """The tensors' names."""
    options: Options
    """The arguments that are no tensors."""
    check: Callable[..., Call]

    def checked(self) -> Call:
        """The checked call on the tensors, whose shapes and dtypes repeat from call to call.
        Symbols cannot be cached by value: with them, use `on`."""
        sizes = (*map(_SHAPE, self.tensors), *map(_DTYPE, self.tensors))
        return _checked(self.check, self.names, self.options, *sizes)

    def on(self, specs: Sequence[ArraySpec]) -> Call:
        """The checked call on tensors of these shapes and dtypes."""
        return _check(self.check, self.names, self.options, specs)


@lru_cache(maxsize=4096)
def _checked(check: Callable[..., Call], names: Names, options: Options, *sizes: Any) -> Call:
    count = len(names)
    return _check(check, names, options, [*map(array_spec, sizes[:count], sizes[count:])])


def _check(
    check: Callable[..., Call], names: Names, options: Options, specs: Sequence[ArraySpec]
) -> Call:
    return check(**dict(zip(names, specs, strict=True)), **dict(options))


class ArgumentReader:
    """Names the arguments of an operator's calls.

    Args:
        op: the op's name in messages.
        schema: has the tensors first; optional ones are keyword-only.
        check: see define().
    """

    def __init__(self, op: str, schema: torch.FunctionSchema, check: Callable[..., Call]) -> None:
        self._op = op
        self._check = check
        self.written_names = [x.name for x in schema.arguments if x.alias_info is not None]
        positional = [x for x in schema.arguments if not x.kwarg_only]
        self._tensor_names = tuple(x.name for x in positional if str(x.type) == "Tensor")
        self._option_names = tuple(x.name for x in positional if str(x.type) != "Tensor")
        self._optional_names = [
            x.name for x in schema.arguments if str(x.type) == "Optional[Tensor]"
        ]

    def read(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> TensorArguments:
        """Refuses tensors on several devices."""
        count = len(self._tensor_names)
        given = [x for x in self._optional_names if keywords.get(x) is not None]
        options = dict(zip(self._option_names, arguments[count:], strict=False))
        options |= {name: x for name, x in keywords.items() if name not in given}
        names = (*self._tensor_names, *given)
        tensors = (*arguments[:count], *[keywords[name] for name in given])
        refuse_several_devices(self._op, names, tensors)
        return TensorArguments(tensors, names, tuple(options.items()), self._check)


def refuse_several_devices(op: str, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Raises if tensors are on several devices. (One meta tensor would select the fake kernel,
    whose results are not computed.)"""
    try:
        devices = [x.device for x in tensors]
    except AttributeError:  # the dispatcher lets None pass for a tensor
        raise missing_error(op, names[[x is None for x in tensors].index(True)]) from None
    if devices.count(devices[0]) == len(devices):
        return
    for name, device in zip(names, devices, strict=True):
        if device != devices[0]:
            raise devices_error(op, name, device, names[0], devices[0])
