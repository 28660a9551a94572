"""Calls of the handlers of varlen_attention and of its derivative, without a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from harness.compare import assert_same_bits
from shared_ffi import varlen_scratch
from shared_ffi.varlen_attention import FEATURES
from tests.cases.varlen import DIFFERENTIABLE, VarlenCase
from tests.support.calls import in_wider_rows, specs
from tests.support.gpu import Kernels

F32, I32 = np.float32, np.int32
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
        # On CUDA a sink's gradient adds up products of all rounded outputs.
        factor = 2 if name == "sinks" and tolerances is CUDA_TOLERANCES else 1
        assert error <= factor * tolerances[dtype] * largest, (name, error, largest)


ANSWERS = (90, 33, 1, 64, 0, 110)
"""A prompt and its answers. Its length is no multiple of a tile's."""


def assert_answers_share_their_prompt(
    kernels: Kernels, dtype: str, tolerances: Any = CUDA_TOLERANCES
) -> None:
    """Outputs have the bits that they have where each answer has a prompt of its own, and the
    gradients of the prompt are the sums of theirs. A prompt and its answers have the same bits in
    any batch."""
    fields: dict[str, Any] = {"dtype": dtype, "arrays": ("prefix_seqs",), "padding": 0}
    case = VarlenCase("answers", ANSWERS, prefix_seqs=(-1, *[0] * 5), **fields)
    arguments, dout = case(), case.weights()
    forward = attend(kernels, arguments, 1)
    found = differentiate(kernels, arguments, dout, forward, 1)
    sums = {name: np.zeros(x.shape) for name, x in found.items()}
    starts, prompt = arguments["query_start_loc"], np.arange(ANSWERS[0])
    for s, (start, end) in enumerate(pairwise(starts)):
        tokens = np.arange(start, end) if s == 0 else np.array([*prompt, *range(start, end)])
        alone = {name: arguments[name][tokens] for name in ARRAYS[:3]}
        alone |= {"query_start_loc": np.array([0, len(tokens)], I32), "num_seqs": I32([1])}
        alone = {x: y for x, y in (arguments | alone).items() if x != "prefix_seqs"}
        of_alone = attend(kernels, alone)
        assert_same_bits(forward[0][start:end], of_alone[0][-(end - start) or len(tokens) :])
        own = dout[tokens].copy()
        own[: len(tokens) - (end - start)] = 0
        for name, gradient in differentiate(kernels, alone, own, of_alone).items():
            np.add.at(sums[name], tokens, gradient.astype(np.float64))
    for name, gradient in found.items():
        error = np.abs(gradient.astype(np.float64) - sums[name]).max()
        assert error <= 2 * tolerances[dtype] * np.abs(sums[name]).max()  # parts are rounded, too

    twice = {name: np.concatenate([arguments[name], arguments[name]]) for name in ARRAYS[:3]}
    twice["query_start_loc"] = np.array([*starts, *(starts[1:] + starts[-1])], I32)
    twice |= {"prefix_seqs": I32([-1, *[0] * 5, -1, *[6] * 5]), "num_seqs": I32([12])}
    in_batch = differentiate(kernels, arguments | twice, np.concatenate([dout, dout]))
    for name, gradient in found.items():
        assert_same_bits(in_batch[name], np.concatenate([gradient, gradient]))
