"""varlen_attention and its derivative on CUDA: every case against the oracle, with any number of
thread blocks, in any batch, with faulty lengths. They run as those of test_cuda_kernel.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.compare import assert_same_bits
from shared_ffi import varlen_scratch
from tests.cases.varlen import CASES, VarlenCase, oracle
from tests.kernels.test_varlen_kernel import ARRAYS, TARGET, TOLERANCES, as_handlers_take_it
from tests.support.calls import specs
from tests.support.gpu import ON_CUDA, Gpu

F32 = np.float32


@pytest.fixture(scope="session")
def kernels(gpu: Gpu) -> Gpu:
    return gpu


def run(
    gpu: Gpu,
    target: str,
    operands: dict[str, np.ndarray],
    results: Sequence[np.ndarray],
    seed: int,
    attributes: dict[str, Any],
) -> list[np.ndarray]:
    """The results, which lie between guard pages, as the operands and the scratch do."""
    call: Any = SimpleNamespace(
        operands=specs([*operands.values()]), names=(*operands,), attributes=[*attributes.items()]
    )
    is_backward = target.endswith("backward")
    size = (varlen_scratch.backward_bytes if is_backward else varlen_scratch.forward_bytes)(call)
    written = [gpu.copy(x) for x in (*results, np.full(size, 0xFF, np.uint8))]
    op = SimpleNamespace(TARGET=target)
    gpu.run(op, [gpu.copy(x) for x in operands.values()], written, seed, **attributes)
    return written[:-1]


def attend(gpu: Gpu, arguments: dict[str, Any], seed: int = 0) -> list[np.ndarray]:
    """The output and its log-sum-exp."""
    arrays, attributes = as_handlers_take_it(arguments, 5)
    query, value = arrays["query"], arrays["value"]
    rows = query.shape[:2]
    results = [np.full((*rows, value.shape[2]), np.nan, query.dtype), np.full(rows, np.nan, F32)]
    return run(gpu, TARGET, arrays, results, seed, attributes)


def differentiate(
    gpu: Gpu,
    arguments: dict[str, Any],
    dout: np.ndarray,
    seed: int = 0,
    forward: Sequence[np.ndarray] = (),
) -> dict[str, np.ndarray]:
    """The gradients by argument."""
    output, lse = forward or attend(gpu, arguments)
    arrays, attributes = as_handlers_take_it(arguments, 8)
    names = [name for name in ("query", "key", "value", "sinks", "alibi_slopes") if name in arrays]
    results = [np.full_like(arrays[name], np.nan) for name in names]
    more = {"output": output, "lse": lse, "dout": dout}
    first = {name: arrays[name] for name in ARRAYS[:3]}
    operands = first | more | {name: x for name, x in arrays.items() if name not in first}
    found = run(gpu, f"{TARGET}_backward", operands, results, seed, attributes)
    return dict(zip(names, found, strict=True))


def assert_close(gradients: dict[str, np.ndarray], case: VarlenCase, expected: Any) -> None:
    for name, gradient in gradients.items():
        largest = max(1, np.abs(expected[name]).max(initial=0))
        error = np.abs(gradient.astype(np.float64) - expected[name]).max(initial=0)
        assert error <= TOLERANCES[case.dtype] * largest, (name, error, largest)


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_derivative(case: VarlenCase, gpu: Gpu) -> None:
    """The gradients are those of float64, and have the same bits with 1, 3, 7 and all thread
    blocks."""
    arguments, dout = case(), case.weights()
    dout[case.num_tokens :] = np.nan
    forward = attend(gpu, arguments)
    gradients = differentiate(gpu, arguments, dout, 0, forward)
    assert_close(gradients, case, oracle(arguments, dout)[1])
    for name in ARRAYS[:3]:
        assert not gradients[name][case.num_tokens :].any()
    for seed in (1, 2, 3):
        for name, gradient in differentiate(gpu, arguments, dout, seed, forward).items():
            assert_same_bits(gradient, gradients[name])
