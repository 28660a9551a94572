"""Calls of the CUDA handlers of varlen_attention and of its derivative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from shared_ffi import varlen_scratch
from tests.cases.varlen import DIFFERENTIABLE
from tests.support.calls import in_wider_rows, specs
from tests.support.gpu import Gpu
from tests.support.varlen_calls import ARRAYS, TARGET, as_handlers_take_it

F32 = np.float32

TOLERANCES = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}
"""Tolerances of gradients, as shares of the largest. What the output is rounded to, its product with its
gradient is computed from."""


def run(
    gpu: Gpu,
    target: str,
    operands: dict[str, np.ndarray],
    results: Sequence[np.ndarray],
    attributes: dict[str, Any],
    seed: int,
    wider: Mapping[str, int],
) -> list[np.ndarray]:
    """The results. All arrays lie between guard pages. `wider`: by how many columns the rows are wider
    that hold those of an operand."""
    if wider:
        query, key, value = (operands[name] for name in ARRAYS[:3])
        attributes = attributes | {"row_heads": query.shape[1], "row_head_size": query.shape[2]}
        attributes |= {"row_kv_heads": key.shape[1], "row_value_head_size": value.shape[2]}
        operands = operands | {
            name: in_wider_rows(operands[name], more)[0]
            for name, more in wider.items()
            if name in operands
        }
    call: Any = SimpleNamespace(
        operands=specs([*operands.values()]),
        results=specs(results),
        names=(*operands,),
        attributes=[*attributes.items()],
    )
    is_backward = target.endswith("backward")
    size = (varlen_scratch.backward_bytes if is_backward else varlen_scratch.forward_bytes)(call)
    written = [gpu.copy(x) for x in (*results, np.full(size, 0xFF, np.uint8))]
    op = SimpleNamespace(TARGET=target)
    gpu.run(op, [gpu.copy(x) for x in operands.values()], written, seed, **attributes)
    return written[:-1]


def attend(
    gpu: Gpu,
    arguments: dict[str, Any],
    seed: int = 0,
    wider: Mapping[str, int] = MappingProxyType({}),
) -> tuple[np.ndarray, ...]:
    """The output and its log-sum-exp."""
    arrays, attributes = as_handlers_take_it(arguments, 5)
    query, value = arrays["query"], arrays["value"]
    rows = query.shape[:2]
    results = [np.full((*rows, value.shape[2]), np.nan, query.dtype), np.full(rows, np.nan, F32)]
    return tuple(run(gpu, TARGET, arrays, results, attributes, seed, wider))


def differentiate(
    gpu: Gpu,
    arguments: dict[str, Any],
    dout: np.ndarray,
    forward: Sequence[np.ndarray],
    seed: int = 0,
    wider: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """The gradients by argument, given the results of the forward."""
    arrays, attributes = as_handlers_take_it(arguments, 8)
    names = [name for name in DIFFERENTIABLE if name in arrays]
    results = [np.full_like(arrays[name], np.nan) for name in names]
    first = {name: arrays[name] for name in ARRAYS[:3]}
    first |= {"output": forward[0], "lse": forward[1], "dout": dout}
    operands = first | {name: x for name, x in arrays.items() if name not in first}
    target = f"{TARGET}_backward"
    found = run(gpu, target, operands, results, attributes, seed, wider)
    return dict(zip(names, found, strict=True))


def assert_close(gradients: dict[str, np.ndarray], dtype: str, expected: Any) -> None:
    for name, gradient in gradients.items():
        largest = max(1, np.abs(expected[name]).max(initial=0))
        error = np.abs(gradient.astype(np.float64) - expected[name]).max(initial=0)
        assert error <= TOLERANCES[dtype] * largest, (name, error, largest)
