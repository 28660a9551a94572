"""Calls of the handlers of varlen_attention and of its derivative, without a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from shared_ffi import varlen_scratch
from shared_ffi.varlen_attention import FEATURES
from tests.cases.varlen import DIFFERENTIABLE
from tests.support.calls import in_wider_rows, specs
from tests.support.gpu import Kernels

F32 = np.float32
TARGET = "xla_gpu_varlen_attention"
ARRAYS = ("query", "key", "value", "query_start_loc", "num_seqs")

TOLERANCES = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-8}
"""Tolerances of gradients, as shares of the largest."""
CUDA_TOLERANCES = TOLERANCES | {"bfloat16": 2**-7}
"""What the output is rounded to, its product with its gradient is computed from."""


def as_handlers_take_it(
    arguments: dict[str, Any], count: int
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a call by name, and its attributes. `count`: operands that every call has."""
    given = dict(arguments)
    arrays = {name: given.pop(name) for name in ARRAYS}
    for name in FEATURES:
        if isinstance(given.get(name), np.ndarray):
            arrays[name] = given.pop(name)
    features = [name for name in arrays if name not in ARRAYS]
    attributes: dict[str, Any] = {name: count + i for i, name in enumerate(features)}
    causal = "causal" not in arrays and given.pop("causal", True)
    right = given.pop("window_right", None)
    if not causal:
        attributes["window_right"] = 2**63 - 1 if right is None else right
    attributes |= {"sliding_window": 0, "soft_cap": 0.0} | given
    return arrays, attributes


def run(
    kernels: Kernels,
    target: str,
    operands: dict[str, np.ndarray],
    results: Sequence[np.ndarray],
    attributes: dict[str, Any],
    seed: int,
    wider: Mapping[str, int],
) -> list[np.ndarray]:
    """The results. On a GPU all arrays lie between guard pages. `wider`: by how many columns the rows are wider
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
    written = [*results]
    if kernels.platform == "cuda":
        call: Any = SimpleNamespace(
            operands=specs([*operands.values()]),
            results=specs(results),
            names=(*operands,),
            attributes=[*attributes.items()],
        )
        is_backward = target.endswith("backward")
        scratch = varlen_scratch.backward_bytes if is_backward else varlen_scratch.forward_bytes
        written.append(np.full(scratch(call), 0xFF, np.uint8))
    written = [kernels.copy(x) for x in written]
    op = SimpleNamespace(TARGET=target)
    kernels.run(op, [kernels.copy(x) for x in operands.values()], written, seed, **attributes)
    return written[: len(results)]


def attend(
    kernels: Kernels,
    arguments: dict[str, Any],
    seed: int = 0,
    wider: Mapping[str, int] = MappingProxyType({}),
) -> tuple[np.ndarray, ...]:
    """The output and its log-sum-exp."""
    arrays, attributes = as_handlers_take_it(arguments, 5)
    query, value = arrays["query"], arrays["value"]
    rows = query.shape[:2]
    results = [np.full((*rows, value.shape[2]), np.nan, query.dtype), np.full(rows, np.nan, F32)]
    return tuple(run(kernels, TARGET, arrays, results, attributes, seed, wider))


def differentiate(
    kernels: Kernels,
    arguments: dict[str, Any],
    dout: np.ndarray,
    forward: Sequence[np.ndarray] | None = None,
    seed: int = 0,
    wider: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """The gradients by argument. `forward`: the output and its log-sum-exp, where they are known."""
    forward = attend(kernels, arguments) if forward is None else forward
    arrays, attributes = as_handlers_take_it(arguments, 8)
    names = [name for name in DIFFERENTIABLE if name in arrays]
    results = [np.full_like(arrays[name], np.nan) for name in names]
    first = {name: arrays[name] for name in ARRAYS[:3]}
    first |= {"output": forward[0], "lse": forward[1], "dout": dout}
    operands = first | {name: x for name, x in arrays.items() if name not in first}
    target = f"{TARGET}_backward"
    found = run(kernels, target, operands, results, attributes, seed, wider)
    return dict(zip(names, found, strict=True))


def assert_close(
    gradients: dict[str, np.ndarray], dtype: str, expected: Any, tolerances: Any = CUDA_TOLERANCES
) -> None:
    for name, gradient in gradients.items():
        largest = max(1, np.abs(expected[name]).max(initial=0))
        error = np.abs(gradient.astype(np.float64) - expected[name]).max(initial=0)
        assert error <= tolerances[dtype] * largest, (name, error, largest)
