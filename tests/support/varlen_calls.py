"""Calls of the handlers of varlen_attention and of its derivative, without a check."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared_ffi.varlen_attention import FEATURES
from tests.cases.varlen import DIFFERENTIABLE
from tests.support.calls import call_handler

TARGET = "xla_gpu_varlen_attention"
ARRAYS = ("query", "key", "value", "query_start_loc", "num_seqs")

TOLERANCES = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-8}
"""Tolerances of gradients, as shares of the largest."""


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


def attend(arguments: dict[str, Any], num_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The output and its log-sum-exp."""
    arrays, attributes = as_handlers_take_it(arguments, 5)
    query, value = arrays["query"], arrays["value"]
    rows = query.shape[:2]
    output = np.full((*rows, value.shape[2]), np.nan, query.dtype)
    lse = np.full(rows, np.nan, np.float32)
    call_handler(TARGET, attributes, [*arrays.values()], [output, lse], num_threads)
    return output, lse


def differentiate(
    arguments: dict[str, Any],
    dout: np.ndarray,
    num_threads: int = 1,
    forward: tuple[np.ndarray, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """The gradients by argument. `forward`: the output and its log-sum-exp."""
    output, lse = attend(arguments) if forward is None else forward
    arrays, attributes = as_handlers_take_it(arguments, 8)
    operands = [*arrays.values()]
    operands[3:3] = [output, lse, dout]
    results = {
        name: np.full_like(arrays[name], np.nan) for name in DIFFERENTIABLE if name in arrays
    }
    call_handler(f"{TARGET}_backward", attributes, operands, [*results.values()], num_threads)
    return results
