"""The emulated GPU executes kernels that are known to work on GPUs: what Triton's compiler emits. It
needs Triton, but no GPU."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import native, selection

pytest.importorskip("triton", reason="its kernels calibrate the emulated GPU: pip install triton")

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
TILES = [(16, 16, 16, 1), (64, 32, 32, 4), (128, 64, 64, 4), (64, 128, 32, 8)]


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("tests.support.triton_kernels")


@pytest.fixture(scope="module")
def machine() -> Any:
    machine = ctypes.CDLL(str(native.emulated_gpu() / "libemulated_gpu_ptx.so"))
    machine.PtxRun.restype = ctypes.c_char_p
    return machine


# The rules of the machine that kernels of Triton's break, and that the project's keep.
@pytest.fixture
def unfenced_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products read what cp.async wrote without fence.proxy.async."""
    monkeypatch.setenv("EMULATED_GPU_UNFENCED_COPIES", "1")


@pytest.fixture
def equal_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads write the same to one place before a barrier."""
    monkeypatch.setenv("EMULATED_GPU_EQUAL_WRITES", "1")


def run(
    machine: Any, kernel: Any, grid: tuple[int, ...], *arguments: Any, ptx: str | None = None
) -> str | None:
    """Runs a kernel. Returns the machine's error."""
    values = [
        ctypes.c_void_p(x.ctypes.data)
        if isinstance(x, np.ndarray)
        else ctypes.c_float(x)
        if isinstance(x, float)
        else ctypes.c_int32(x)
        for x in arguments
    ]
    values += [ctypes.c_void_p(), ctypes.c_void_p()]  # scratch that these kernels do not use
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
    error = machine.PtxRun(
        (ptx or kernel.asm["ptx"]).encode(),
        kernel.metadata.name.encode(),
        (ctypes.c_uint32 * 3)(*grid, *[1] * (3 - len(grid))),
        ctypes.c_uint32(32 * kernel.metadata.num_warps),
        ctypes.c_size_t(kernel.metadata.shared),
        addresses,
    )
    return None if error is None else error.decode()


def numbers(seed: int, *shape: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


@pytest.mark.parametrize("columns", [16, 200, 1024])
def test_softmax(columns: int, kernels: Any, machine: Any) -> None:
    size = max(32, 1 << (columns - 1).bit_length())
    signature = {"x": "*fp32", "y": "*fp32", "columns": "i32"}
    kernel = kernels.compiled(kernels.softmax, 80, signature, {"SIZE": size})
    columns = columns // 16 * 16
    x = np.random.default_rng(0).standard_normal((5, columns)).astype(np.float32)
    y = np.full_like(x, np.nan)
    assert run(machine, kernel, (5,), x, y, columns) is None
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y, powers / powers.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("transposed", ["", "a", "b"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.usefixtures("unfenced_copies")
def test_matmul(
    target: int, dtype: str, tile: tuple[int, ...], transposed: str, kernels: Any, machine: Any
) -> None:
    m, n, k, num_warps = tile
    signature = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32", "k_size": "i32"}
    strides = ("a_row", "a_column", "b_row", "b_column", "c_row")
    ones = {
        "a_row" if transposed == "a" else "a_column",
        "b_row" if transposed == "b" else "b_column",
    }
    signature |= {name: "i32" for name in strides if name not in ones}
    constants = {"M": m, "N": n, "K": k} | dict.fromkeys(ones, 1)
    kernel = kernels.compiled(kernels.matmul, target, signature, constants, num_warps=num_warps)
    rows, columns, depth = 2 * m, 2 * n, 4 * k
    a = numbers(1, *((depth, rows) if transposed == "a" else (rows, depth)), dtype=dtype)
    b = numbers(2, *((columns, depth) if transposed == "b" else (depth, columns)), dtype=dtype)
    c = np.full((rows, columns), np.nan, np.float32)
    widths = [a.shape[1], b.shape[1], columns]
    assert run(machine, kernel, (2, 2), a, b, c, depth, *widths) is None
    a = a.T if transposed == "a" else a
    b = b.T if transposed == "b" else b
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("num_warps", [1, 4])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("equal_writes")
def test_matmul_with_warps_that_copy(
    dtype: str, columns: int, stages: int, num_warps: int, kernels: Any, machine: Any
) -> None:
    kernel = pipelined(kernels, dtype, columns, stages, num_warps)
    error, result, expected = multiply(machine, kernel, dtype, columns)
    assert error is None
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def pipelined(kernels: Any, dtype: str, columns: int, stages: int, num_warps: int) -> Any:
    signature = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32"}
    signature |= dict.fromkeys(("a_row", "b_row", "c_row", "num_tiles"), "i32")
    constants = {"M": 64, "N": columns, "K": 64, "STAGES": stages, "WARPS": num_warps}
    return kernels.compiled(kernels.pipelined_matmul, 90, signature, constants, num_warps=4)


def multiply(
    machine: Any, kernel: Any, dtype: str, columns: int, ptx: str | None = None
) -> tuple[str | None, np.ndarray, np.ndarray]:
    """The machine's error, its result and NumPy's."""
    rows, columns, num_tiles = 128, 2 * columns, 7
    a = numbers(1, rows, 64 * num_tiles, dtype=dtype)
    b = numbers(2, 64 * num_tiles, columns, dtype=dtype)
    c = np.full((rows, columns), np.nan, np.float32)
    error = run(machine, kernel, (2, 2), a, b, c, a.shape[1], columns, columns, num_tiles, ptx=ptx)
    return error, c, a.astype(np.float64) @ b.astype(np.float64)


@pytest.mark.pairwise
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.usefixtures("unfenced_copies")
def test_attention(
    target: int, dtype: str, size: int, causal: bool, kernels: Any, machine: Any
) -> None:
    kernel = attention(kernels, target, dtype, size, causal)
    error, output, expected = attend(machine, kernel, dtype, size, causal)
    assert error is None
    np.testing.assert_allclose(output, expected, atol=0.02)


def attention(kernels: Any, target: int, dtype: str, size: int, causal: bool) -> Any:
    signature = dict.fromkeys(("query", "key", "value"), f"*{dtype}")
    signature |= {"output": "*fp32", "scale": "fp32", "length": "i32"}
    constants = {"D": size, "M": 64, "N": 64, "CAUSAL": causal}
    return kernels.compiled(kernels.attention, target, signature, constants, num_stages=3)


def attend(
    machine: Any, kernel: Any, dtype: str, size: int, causal: bool, ptx: str | None = None
) -> tuple[str | None, np.ndarray, np.ndarray]:
    """The machine's error, its result and NumPy's."""
    length = 256
    q, k, v = (numbers(seed, length, size, dtype=dtype) for seed in range(3))
    output = np.full((length, size), np.nan, np.float32)
    scale = float(np.log2(np.e) / size**0.5)
    error = run(machine, kernel, (length // 64,), q, k, v, output, scale, length, ptx=ptx)
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    expected = weights @ v.astype(np.float64) / weights.sum(axis=1, keepdims=True)
    return error, output, expected


# What makes the kernels' copies and products wait for each other.
WAITS = ["bar.sync", "barrier.sync", "cp.async.wait_group", "cp.async.mbarrier", "mbarrier.arrive"]
WAITS += ["wgmma.wait_group", "wgmma.fence", "fence.proxy.async"]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.usefixtures("unfenced_copies")
def test_a_missing_wait_is_found(target: int, kernels: Any, machine: Any) -> None:
    kernel = attention(kernels, target, "fp16", 64, False)
    check_missing_waits(
        kernel.asm["ptx"], lambda ptx: attend(machine, kernel, "fp16", 64, False, ptx), atol=0.02
    )


@pytest.mark.usefixtures("equal_writes")
def test_a_missing_wait_of_warps_that_copy_is_found(kernels: Any, machine: Any) -> None:
    kernel = pipelined(kernels, "fp16", 64, 2, 1)
    check_missing_waits(
        kernel.asm["ptx"], lambda ptx: multiply(machine, kernel, "fp16", 64, ptx), atol=1e-3
    )


def check_missing_waits(
    ptx: str, compute: Callable[[str], tuple[str | None, np.ndarray, np.ndarray]], atol: float
) -> None:
    """Removes each barrier, wait and fence of a kernel, one at a time."""
    error, result, expected = compute(ptx)
    assert error is None
    np.testing.assert_allclose(result, expected, atol=atol)
    lines = ptx.split("\n")
    places = [n for n, line in enumerate(lines) if any(wait in line for wait in WAITS)]
    missed = []
    for place in places if selection.everything else places[::3]:
        error, result, _ = compute("\n".join([*lines[:place], *lines[place + 1 :]]))
        if error is None and np.allclose(result, expected, atol=atol):
            missed.append(lines[place].strip())
    print(len(places), "places, missed:", missed)
    assert len(missed) <= len(places) // 3, missed
