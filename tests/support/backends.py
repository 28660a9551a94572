"""The backends: functions that call an op on NumPy arrays and numbers in one framework. They return a
NumPy array, or a tuple of arrays where the op has several results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from harness.arrays import packed, to_numpy, to_torch, unpacked
from tests.support import calls
from tests.support.calls import overload_of, split_keywords

Backend = Callable[..., Any]

JAX_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""An error of a handler in JAX, which is one of the two, by timing."""


def xla_device() -> torch.device:
    """torch_xla's device; skips the test where torch_xla is not installed, as it is for PyTorch 2.9
    only."""
    return pytest.importorskip("torch_xla").device()


def are_of_torch_xla(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether torch_xla has the dtypes of these arrays."""
    return all(x.dtype != ml_dtypes.float8_e8m0fnu for x in arrays.values())


def to_xla(array: Any) -> torch.Tensor:
    return to_torch(array).to(xla_device())


def jitted(op: str, **options: Any) -> Any:
    """A jitted function of the arrays alone."""
    return jax.jit(partial(getattr(jax_frontend, op), **options))


def in_jax(op: str, *operands: Any, **attributes: Any) -> Any:
    arrays, options = split_keywords(attributes)
    return jax.tree.map(np.asarray, jitted(op, **options)(*operands, **arrays))


def call_torch(
    convert: Callable[[Any], torch.Tensor],
    compile_with: str | None,
    op: str,
    *operands: Any,
    **attributes: Any,
) -> Any:
    """Calls the op in PyTorch on converted arrays."""
    overload, attributes = overload_of(op, attributes)
    arrays, options = split_keywords(attributes)
    in_place = overload._schema.is_mutable

    def function(*tensors: torch.Tensor, **keywords: torch.Tensor) -> Any:
        result = overload(*tensors, **keywords, **options)
        return written(tensors, keywords) if in_place else result

    def written(tensors: Any, keywords: Any) -> Any:
        results = [tensors[0], *calls.written(keywords)]
        return tuple(results) if len(results) > 1 else results[0]

    if compile_with is not None:
        torch._dynamo.reset()
        function = torch.compile(function, backend=compile_with, fullgraph=True, dynamic=False)
    tensors = [convert(operand) for operand in operands]
    keywords = {name: convert(x) for name, x in arrays.items()}
    with torch.no_grad():
        result = function(*tensors, **keywords)
    if in_place:
        result = written(tensors, keywords)
    return tuple(map(to_numpy, result)) if isinstance(result, tuple) else to_numpy(result)


def lazily(op: str, *operands: Any, **attributes: Any) -> list[torch.Tensor]:
    """The lazy results of an op in torch_xla, not computed yet."""
    overload, attributes = overload_of(op, attributes)
    arrays, options = split_keywords(attributes)
    tensors = [to_xla(x) for x in operands]
    keywords = {name: to_xla(x) for name, x in arrays.items()}
    result = overload(*tensors, **keywords, **options)
    if overload._schema.is_mutable:
        return [tensors[0], *keywords.values()]
    return list(result) if isinstance(result, tuple) else [result]


def in_jax_of_float4(op: str, *operands: Any, **attributes: Any) -> Any:
    """Calls the op in JAX with float4_e2m1fn in the place of uint8, also in the results."""

    def expand(array: Any) -> Any:
        if getattr(array, "dtype", None) != np.uint8:
            return array
        return unpacked(array, "e2m1").astype(ml_dtypes.float4_e2m1fn)

    def pack(array: np.ndarray) -> np.ndarray:
        return packed(array, "e2m1") if array.dtype == ml_dtypes.float4_e2m1fn else array

    attributes = {name: expand(x) for name, x in attributes.items()}
    return jax.tree.map(pack, in_jax(op, *map(expand, operands), **attributes))


def to_torch_of_float4(array: Any) -> torch.Tensor:
    """A tensor with a copy of an array, of float4_e2m1fn_x2 where that is of uint8."""
    tensor = to_torch(array)
    return tensor.view(torch.float4_e2m1fn_x2) if tensor.dtype == torch.uint8 else tensor


in_torch_of_float4 = partial(call_torch, to_torch_of_float4, None)
in_inductor_of_float4 = partial(call_torch, to_torch_of_float4, "inductor")
in_torch = partial(call_torch, to_torch, None)
in_inductor = partial(call_torch, to_torch, "inductor")
in_torch_xla = partial(call_torch, to_xla, None)
in_openxla = partial(call_torch, to_xla, "openxla")
in_openxla_on_torch = partial(call_torch, to_torch, "openxla")


def forget_failed_steps() -> None:
    """Runs steps until none fails: torch_xla raises a failed step's error again in the next
    step."""
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            (torch.zeros(1, device=xla_device()) + 1).cpu()


BACKENDS: dict[str, Backend] = {
    "jax": in_jax,
    "torch": in_torch,
    "torch_xla": in_torch_xla,
    "openxla": in_openxla,
}


def flat(inputs: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(array) for array in inputs]
