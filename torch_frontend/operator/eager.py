"""The kernels for PyTorch's own tensors, on the CPU and on CUDA: they call the handler.

The life of a call:

1. Python: a public function checks types and calls the operator. PyTorch dispatches to the kernel.
2. C++: ``EagerKernel`` (csrc/torch/eager_kernel.cc) reads the tensors and the call's signature:
   shapes, strides, dtypes and options. It reads tensors through PyTorch's C interface, not through
   Python. It goes on with step 4 if it has seen the signature.
3. Python: `prepare` runs the op's check, and decides all that follows from the signature: handler,
   copies, results, scratch. C++ is asked once in between, for the sizes of CUDA's scratch. The
   answer is a PreparedCall, which C++ keeps.
4. C++: ``EagerKernel`` checks what changes from call to call, which is derivatives and shared
   memory; copies, allocates, and runs the handler: on the CPU with PyTorch's number of threads, on
   CUDA on PyTorch's current stream. `errors` has the words of what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from shared_ffi import _native, eager, token_rows
from shared_ffi.spec import ArraySpec, Call, dtype_error, shape_error, value_error
from torch_frontend.operator import errors
from torch_frontend.operator.arguments import (
    ArgumentReader,
    TensorArguments,
    array_spec,
    refuse_several_devices,
    specs,
)

RULES = _native.TorchRules(torch, errors)
"""PyTorch's rules for derivatives, versions and shared memory, for every kind of tensor."""


Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The bytes of an element, sizes and strides."""


class PreparedCall(NamedTuple):
    """How calls of one signature are made."""

    handler: Any
    attributes: dict[str, float | int]
    operands: Sequence[ArraySpec]
    results: Sequence[ArraySpec]
    """All that the handler writes. On CUDA, the scratch is the last."""
    names: tuple[str, ...]
    """The operands' names."""
    copied: list[int]
    """The operands of which the handler gets a contiguous copy."""
    layouts: list[Layout]
    """How the elements of each operand lie, or those of its copy."""
    out_bytes: int
    """The size of the tensor ``out``; 0: there is none."""
    written: list[int]
    """The operands that are written in place."""
    allocated: list[Callable[[], torch.Tensor]]
    """Functions that make the results that have no tensor yet, which are the last ones."""
    num_returned: int
    """How many of these the operator returns."""


class Eager:
    """How an operator's tensors may lie in memory.

    Args:
        op: the op's name in messages.
        reader: of the operator.
        strided: see define().
        rows: see define().
    """

    def __init__(
        self, op: str, reader: ArgumentReader, strided: Sequence[str], rows: Sequence[str]
    ) -> None:
        self._op = op
        self._reader = reader
        self._written = reader.written_names
        self._strided = strided
        self.rows = rows

    def kernel(
        self,
        device: str,
        keys: Sequence[int] = (),
        otherwise: Callable[..., Any] | None = None,
        *,
        returns_out: bool = False,
    ) -> _native.EagerKernel:
        """A kernel for tensors on "cpu" or "cuda".

        Args:
            device: of all tensors.
            keys: the raw DispatchKeySets for which the handler may be called directly. The kernel
                then takes a call's DispatchKeySet first; without `keys` it takes none.
            otherwise: takes calls with other keys.
            returns_out: the operator returns its argument ``out``.
        """
        prepare = _native.Untraced(partial(self.prepare, device))
        return _native.EagerKernel(
            self._op, device == "cuda", RULES, prepare, keys, otherwise, returns_out
        )

    def prepare(
        self, device: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> PreparedCall:
        """Checks a call."""
        out = keywords.get("out")
        given = {name: value for name, value in keywords.items() if name != "out"}
        bound = self._reader.read(arguments, given)
        operands, copied = self.in_memory(bound)
        call = bound.on(operands)
        if out is not None:
            check_out(call, bound.tensors[0], out)
        num_written = len(call.aliases) if out is None else 1
        results = call.results_on(device)
        return PreparedCall(
            eager.handler_of(call, device, partial(self._copies, bound, copied)),
            {name: value.item() for name, value in call.attributes},
            call.operands,
            results,
            bound.names,
            copied,
            [(x.nbytes, (), ()) if i in copied else layout(x) for i, x in enumerate(bound.tensors)],
            0 if out is None else out.nbytes,
            [operand for operand, _ in call.aliases],
            [_maker(spec, bound.tensors[0].device) for spec in results[num_written:]],
            len(call.results) - num_written,
        )

    def in_memory(
        self, bound: TensorArguments, *, takes_rows: bool = True
    ) -> tuple[list[ArraySpec], list[int]]:
        """The operands as a handler takes them, and the numbers of those that must be copied for
        that. Each is contiguous, `strided`, or one of `rows` unless `takes_rows` is False. A copy
        of what is written in place would lose the write: the check refuses its strides instead."""
        operands, copied = specs(bound.tensors), []
        for i, (name, tensor) in enumerate(zip(bound.names, bound.tensors, strict=True)):
            if tensor.is_contiguous():
                continue
            is_row = name in self.rows and (name in self._written or _are_rows(tensor))
            if name in self._strided or (takes_rows and is_row):
                operands[i] = operands[i]._replace(strides=tensor.stride())
            else:
                copied.append(i)
        return operands, copied

    def _copies(self, bound: TensorArguments, copied: Sequence[int]) -> list[str]:
        """For the log: the operands that are copied at each call, and why."""
        return [
            f"copies {bound.names[i]}, whose strides {list(bound.tensors[i].stride())} are not "
            f"{'tokens of dense heads' if bound.names[i] in self.rows else 'contiguous'}"
            for i in copied
        ]


def check_out(call: Call, like: torch.Tensor, out: torch.Tensor) -> None:
    """Checks the tensor that a call writes its result to."""
    check_fits(call.op, "out", call.results[0], out)
    if not out.is_contiguous():
        got, remedy = f"strides {list(out.stride())}", "Make it with torch.empty"
        raise value_error(call.op, "out", "be contiguous", got, remedy)
    refuse_several_devices(call.op, ("the first tensor", "out"), (like, out))


def check_fits(op: str, name: str, result: ArraySpec, target: torch.Tensor) -> None:
    """Checks shape and dtype of a tensor that a result is written to."""
    given = array_spec(target.shape, target.dtype)
    if given.shape != result.shape:
        rule, remedy = str(list(result.shape)), "It has the shape of the result"
        raise shape_error(op, name, rule, given.shape, remedy)
    if given.dtype != result.dtype:
        raise dtype_error(op, name, f"dtype {result.dtype}", given.dtype)


def share_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two views of one storage share elements; False if a size or a stride is a symbol."""
    begins: list[int] = []
    for view in (x, y):
        first = view.storage_offset()
        if type(first) is not int or not all(type(n) is int for n in (*view.shape, *view.stride())):
            return False
        begins.append(first * view.itemsize)
    return _native.share_elements(layout(x), layout(y), begins[1] - begins[0])


def layout(tensor: torch.Tensor) -> Layout:
    """How a tensor's elements lie in memory."""
    return tensor.itemsize, tuple(tensor.shape), tensor.stride()


def _maker(spec: ArraySpec, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that makes a tensor of this shape and dtype."""
    dtype = getattr(torch, spec.dtype)
    # What Inductor's programs call, a private function: 2,300 instructions, where torch.empty takes
    # 7,300.
    empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    if device.type != "cpu" or empty_strided is None:
        return partial(torch.empty, spec.shape, dtype=dtype, device=device)
    strides = torch.empty(spec.shape, device="meta").stride()
    return partial(empty_strided, spec.shape, strides, dtype)


def _are_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 3 and token_rows.are_rows(tensor.shape, tensor.stride())
