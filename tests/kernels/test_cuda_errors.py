"""Errors of the CUDA runtime: on the emulated GPU every call fails once, and the error names the
call."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shared_ffi import kv_cache_update, paged_attention, simple_add
from tests.cases.all import CASES, UPDATE_CASES
from tests.support.calls import checked_call, numbers, results_of
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
    monkeypatch.setenv("XLA_GPU_PTX_FAIL", name)
    with pytest.raises(RuntimeError, match=f"^[a-z_]+: {name} failed: unknown error$"):
        gpu.run(op, operands, results, device, **attributes)
    monkeypatch.delenv("XLA_GPU_PTX_FAIL")
    gpu.run(op, operands, results, device, **attributes)  # CUDA's last error is cleared


def test_a_gpu_that_the_build_left_out_is_named(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes, operands, results = call_of(paged_attention)
    no_kernel_image = 209  # cudaErrorNoKernelImageForDevice
    monkeypatch.setenv("XLA_GPU_PTX_FAIL", f"cudaFuncSetAttribute={no_kernel_image}")
    with pytest.raises(RuntimeError, match=r"only for .+\. Build it .* XLA_GPU_ARCHITECTURES"):
        gpu.run(paged_attention, operands, results, next(new_device), **attributes)


def test_device_properties_are_read_once(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes, operands, results = call_of(paged_attention)
    device = next(new_device)
    gpu.run(paged_attention, operands, results, device, **attributes)
    for name in (*CALLS[1:3], "cudaFuncSetAttribute"):
        monkeypatch.setenv("XLA_GPU_PTX_FAIL", name)
        gpu.run(paged_attention, operands, results, device, **attributes)


def test_a_grid_that_is_too_large_is_an_error(gpu: EmulatedGpu) -> None:
    """A launch would use the number of thread blocks modulo 2^32."""
    call = gpu.native.EagerCall(
        "cuda", simple_add.TARGET, {}, *[[ArrayOfAnySize()] * count for count in (2, 1)]
    )
    with pytest.raises(RuntimeError, match="simple_add: cudaLaunchKernelEx failed: the grid"):
        call([0, 0], [0])


class ArrayOfAnySize:
    """An array with a shape but without memory."""

    shape = (2**40,)
    dtype = "float32"
