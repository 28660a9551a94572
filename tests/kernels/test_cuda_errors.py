"""Errors of the CUDA runtime: on the emulated GPU every call fails once, and the error names the
call."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from shared_ffi import kv_cache_update, paged_attention, simple_add
from shared_ffi.spec import ArraySpec, Call
from tests.cases.all import CASES, UPDATE_CASES
from tests.support.calls import checked_call, eager_call, numbers, results_of
from tests.support.gpu import ON_CUDA, EmulatedGpu

pytestmark = pytest.mark.skipif(ON_CUDA, reason="a GPU's calls do not fail on demand")

CALLS = [
    "cudaGetDevice",
    "cudaDeviceGetAttribute",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    "cudaLaunchKernelEx",
]

# Each seed stands for a new device: the library has not cached its properties.
new_device = itertools.count(1000)


def call_of(op: Any) -> tuple[dict[str, Any], list[np.ndarray], list[np.ndarray]]:
    """The attributes, operands and results of the op's call on CUDA."""
    if op is simple_add:
        return {}, [np.ones(3, np.float32)] * 2, [np.empty(3, np.float32)]
    cases: Any = CASES if op is paged_attention else UPDATE_CASES
    # At this head size the tensor core kernel must ask CUDA for more shared memory than the
    # default.
    case = next(x for x in cases if x.dtype == "bfloat16" and x.head_size == 128)
    name = op.TARGET.removeprefix("xla_gpu_")
    call, arrays = checked_call(name, case.inputs(), case.attributes())
    results = results_of(call, arrays)
    if op is paged_attention:
        results.append(np.empty(call.results_on("cuda")[-1].shape, np.uint8))
    return numbers(call), arrays, results


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (simple_add, "cudaLaunchKernelEx"),
        (kv_cache_update, "cudaLaunchKernelEx"),
        *((paged_attention, name) for name in CALLS),
        (paged_attention, "cudaFuncSetAttribute"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__.rpartition(".")[2],
)
def test_a_failing_call_is_an_error_that_names_it(
    op: Any, name: str, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes, operands, results = call_of(op)
    device = next(new_device)
    monkeypatch.setenv("EMULATED_GPU_FAIL", name)
    with pytest.raises(RuntimeError, match=f"^[a-z_]+: {name} failed: unknown error$"):
        gpu.run(op, operands, results, device, **attributes)
    monkeypatch.delenv("EMULATED_GPU_FAIL")
    gpu.run(op, operands, results, device, **attributes)  # CUDA's last error is cleared


def test_a_gpu_that_the_build_left_out_is_named(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes, operands, results = call_of(paged_attention)
    no_kernel_image = 209  # cudaErrorNoKernelImageForDevice
    monkeypatch.setenv("EMULATED_GPU_FAIL", f"cudaFuncSetAttribute={no_kernel_image}")
    with pytest.raises(RuntimeError, match=r"only for .+\. Build it .* XLA_GPU_ARCHITECTURES"):
        gpu.run(paged_attention, operands, results, next(new_device), **attributes)


def test_device_properties_are_read_once(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes, operands, results = call_of(paged_attention)
    device = next(new_device)
    gpu.run(paged_attention, operands, results, device, **attributes)
    for name in (*CALLS[1:3], "cudaFuncSetAttribute"):
        monkeypatch.setenv("EMULATED_GPU_FAIL", name)
        gpu.run(paged_attention, operands, results, device, **attributes)


def test_a_grid_that_is_too_large_is_an_error(gpu: EmulatedGpu) -> None:
    """A launch would use the number of thread blocks modulo 2^32."""
    arrays: list[Any] = [[ArrayOfAnySize()] * count for count in (2, 1)]
    call = eager_call(simple_add.TARGET, {}, *arrays, "cuda", gpu.native)
    with pytest.raises(RuntimeError, match="simple_add: cudaLaunchKernelEx failed: the grid"):
        call([0, 0], [0])


class ArrayOfAnySize:
    """An array with a shape but without memory."""

    shape = (2**40,)
    dtype = "float32"


def huge_attention(num_tokens: int, block_size: int) -> Call:
    cache = ArraySpec((1, block_size, 2, 8), "float32")
    shapes = (1,), (1, 1), (2,), (1,)
    metadata = [ArraySpec(shape, "int32") for shape in shapes]
    return paged_attention.check(ArraySpec((num_tokens, 8, 8), "float32"), cache, *metadata, 1.0)


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "message"),
    [
        (2**28, 1, "query must have num_tokens * num_heads below 2**31"),
        (1, 2**31, "kv_cache must have a block_size below 2**31"),
    ],
)
def test_sizes_that_only_cuda_does_not_take(
    gpu: EmulatedGpu, num_tokens: int, block_size: int, message: str
) -> None:
    """Before a kernel is launched, and in the handler of a program that no check has passed."""
    call = huge_attention(num_tokens, block_size)
    with pytest.raises(ValueError, match=f"^paged_attention: {re.escape(message)} on CUDA"):
        call.results_on("cuda")
    fitting = huge_attention(1, 1)
    attributes = {name: value.item() for name, value in fitting.attributes}
    results = [*call.results, fitting.results_on("cuda")[-1]]
    run = eager_call(call.target, attributes, call.operands, results, "cuda", gpu.native)
    with pytest.raises(ValueError, match=f"^paged_attention: operand {re.escape(message)}"):
        run([0] * len(call.operands), [0, 0])


@pytest.mark.parametrize("argument", ["query", "key"])
def test_tokens_of_too_many_elements(argument: str) -> None:
    rows, cache = (ArraySpec((*x, 512), "float32") for x in ((0, 2**21 + 1), (1, 1, 2**22 + 2)))
    metadata = [ArraySpec(shape, "int32") for shape in ((1,), (1, 1), (2,), (1,))]
    rule = "have num_heads * head_size of at most 2**30; got 2097153 * 512"
    with pytest.raises(ValueError, match=re.escape(f"{argument} must {rule}")):
        if argument == "query":
            paged_attention.check(rows, cache, *metadata, 1.0)
        else:
            kv_cache_update.check(cache, rows, rows, ArraySpec((0,), "int32"))
