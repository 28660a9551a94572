"""The calls of an op under ``torch.func.vmap``, and those of a batch of output gradients
(``is_grads_batched``), as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.utils._pytree import tree_map

from torch_frontend.operator.arguments import TensorArguments

Dims = Sequence[int | None]
"""The mapped dimension of each tensor; None: it is that of every call."""


def batch(overload: torch._ops.OpOverload, bound: TensorArguments) -> Any:
    """Makes a call of tensors under ``torch.func.vmap``. This is what torch.library.register_vmap
    does, which refuses ops with keyword-only tensors."""

    def as_one(info: Any, dims: Dims, *tensors: torch.Tensor) -> Any:
        return _as_one(call, info.batch_size, dims, tensors)

    call = partial(_call, overload, bound)
    interpreter = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, as_one, call, *bound.tensors)


def batch_gradients(overload: torch._ops.OpOverload, bound: TensorArguments) -> Any:
    """Makes a call under ``is_grads_batched``, whose tensors are of another kind."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    dims = [
        0 if torch._C._functorch.is_legacy_batchedtensor(x) else None  # type: ignore[attr-defined]
        for x in bound.tensors
    ]
    tensors = [
        x if dim is None else torch._remove_batch_dim(x, level, 0, 0)
        for x, dim in zip(bound.tensors, dims, strict=True)
    ]
    size = tensors[dims.index(0)].shape[0]
    results, result_dims = _as_one(partial(_call, overload, bound), size, dims, tensors)
    return tree_map(lambda x, dim: torch._add_batch_dim(x, dim, level), results, result_dims)


def _call(overload: torch._ops.OpOverload, bound: TensorArguments, *tensors: torch.Tensor) -> Any:
    named = dict(zip(bound.names, tensors, strict=True))
    return overload(**named, **dict(bound.options))


def _as_one(
    call: Callable[..., Any], size: int, dims: Dims, tensors: Sequence[torch.Tensor]
) -> tuple[Any, Any]:
    """The results of all calls, and their mapped dimensions. Floating-point arrays are ``[heads]``
    or ``[tokens, heads, ...]``, and a head's results depend on no other group's: the calls' heads
    become those of one call. Calls that differ in other arrays, which say where sequences are, are
    made one by one."""
    if size == 0:  # a call of zeros, whose results are not taken
        one = [
            x if dim is None else x.sum(dim, dtype=x.dtype)
            for x, dim in zip(tensors, dims, strict=True)
        ]
        results = call(*one)
        return tree_map(lambda x: x[None][:0], results), tree_map(lambda _: 0, results)
    mapped = [*zip(tensors, dims, strict=True)]
    if all(dim is None or x.is_floating_point() for x, dim in mapped):
        results = call(*[_with_all_heads(x, dim, size) for x, dim in mapped])
        of_calls = tree_map(lambda x: x.unflatten(_heads(x), (size, -1)), results)
        return of_calls, tree_map(_heads, results)
    calls = [
        call(*[x if dim is None else x.select(dim, i) for x, dim in mapped]) for i in range(size)
    ]
    return tree_map(lambda *x: torch.stack(x), *calls), tree_map(lambda _: 0, calls[0])


def _heads(x: torch.Tensor) -> int:
    """The dimension of heads of one call's array."""
    return min(x.dim(), 2) - 1


def _with_all_heads(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """One call's array, or those of all calls along dimension `dim`, with the heads of all."""
    if not x.is_floating_point():
        return x
    of_each = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    heads = _heads(of_each[0])
    return of_each.movedim(0, heads).flatten(heads, heads + 1)
