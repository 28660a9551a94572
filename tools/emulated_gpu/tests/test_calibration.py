"""The emulated GPU executes kernels that are known to work on GPUs: what Triton's compiler emits. It
needs Triton, but no GPU."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tools.emulated_gpu import build
from tools.emulated_gpu.calls import tensor_map
from tools.emulated_gpu.tensor_cores import add_products

pytest.importorskip("triton", reason="its kernels calibrate the emulated GPU: pip install triton")

DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
BOX_DTYPES = {"u8": np.uint8, "i16": np.uint16, "fp32": np.float32}
TILES = [(16, 16, 16, 1), (64, 32, 32, 4), (128, 64, 64, 4), (64, 128, 32, 8)]


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("tools.emulated_gpu.tests.triton_kernels")


@pytest.fixture(scope="module")
def machine() -> Any:
    machine = ctypes.CDLL(str(build.libraries() / "libemulated_gpu_ptx.so"))
    machine.PtxRun.restype = ctypes.c_char_p
    return machine


@pytest.fixture
def step(request: pytest.FixtureRequest) -> int:
    """The tests remove each wait; make test tries each third of them."""
    return 1 if request.config.getoption("--all", True) else 3


# The rules of the machine that kernels of Triton's break, and that the project's keep.
@pytest.fixture
def unfenced_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products read what cp.async wrote without fence.proxy.async."""
    monkeypatch.setenv("EMULATED_GPU_UNFENCED_COPIES", "1")


@pytest.fixture
def equal_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads write the same to one place before a barrier."""
    monkeypatch.setenv("EMULATED_GPU_EQUAL_WRITES", "1")


@pytest.fixture
def unfenced_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of boxes count at an mbarrier without fence.mbarrier_init after its mbarrier.init."""
    monkeypatch.setenv("EMULATED_GPU_UNFENCED_BARRIERS", "1")


@dataclass
class Boxes:
    """An argument: a tensor of which a kernel copies boxes. `swizzle`: in place of the kernel's."""

    tensor: np.ndarray
    swizzle: int | None = None

    def values(self, machine: Any, box: dict[str, Any]) -> list[Any]:
        swizzle = box["swizzle"] if self.swizzle is None else self.swizzle
        error, encoded = tensor_map(machine, self.tensor, box["block_size"], swizzle=swizzle)
        assert error == 0
        strides = (stride // self.tensor.itemsize for stride in self.tensor.strides)
        return [encoded, *map(ctypes.c_int32, self.tensor.shape), *map(ctypes.c_int64, strides)]


def run(
    machine: Any, kernel: Any, grid: tuple[int, ...], *arguments: Any, ptx: str | None = None
) -> str | None:
    """Runs a kernel. Returns the machine's error."""
    if isinstance(machine, Driver):
        return machine.run(kernel, grid, *arguments)
    boxes = iter(kernel.metadata.tensordesc_meta or ())
    values: list[Any] = []
    for x in arguments:
        if isinstance(x, Boxes):
            values += x.values(machine, next(boxes))
        elif isinstance(x, np.ndarray):
            values.append(ctypes.c_void_p(x.ctypes.data))
        else:
            values.append(ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int32(x))
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
    target: int,
    dtype: str,
    tile: tuple[int, ...],
    transposed: str,
    kernels: Any,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EMULATED_GPU_CAPABILITY", str(target))
    m, n, k, _ = tile
    rows, columns, depth = 2 * m, 2 * n, 4 * k
    a = numbers(1, *((depth, rows) if transposed == "a" else (rows, depth)), dtype=dtype)
    b = numbers(2, *((columns, depth) if transposed == "b" else (depth, columns)), dtype=dtype)
    c = matmul(machine, kernels, target, tile, a, b, transposed)
    a = a.T if transposed == "a" else a
    b = b.T if transposed == "b" else b
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-3)
    expected = add_products(np.zeros_like(c), a, b, target)
    np.testing.assert_array_equal(c.view(np.uint32), expected.view(np.uint32))


def matmul(
    machine: Any,
    kernels: Any,
    target: int,
    tile: tuple[int, ...],
    a: np.ndarray,
    b: np.ndarray,
    transposed: str = "",
) -> np.ndarray:
    m, n, k, num_warps = tile
    dtype = next(name for name, numpy_dtype in DTYPES.items() if numpy_dtype == a.dtype)
    signature = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32", "k_size": "i32"}
    strides = ("a_row", "a_column", "b_row", "b_column", "c_row")
    ones = {
        "a_row" if transposed == "a" else "a_column",
        "b_row" if transposed == "b" else "b_column",
    }
    signature |= {name: "i32" for name in strides if name not in ones}
    constants = {"M": m, "N": n, "K": k} | dict.fromkeys(ones, 1)
    kernel = kernels.compiled(kernels.matmul, target, signature, constants, num_warps=num_warps)
    rows, depth = a.T.shape if transposed == "a" else a.shape
    columns = b.shape[0] if transposed == "b" else b.shape[1]
    c = np.full((rows, columns), np.nan, np.float32)
    widths = [a.shape[1], b.shape[1], columns]
    assert run(machine, kernel, (rows // m, columns // n), a, b, c, depth, *widths) is None
    return c


def exponents_apart(a: np.ndarray, b: np.ndarray) -> None:
    """Terms of which others keep few bits or none."""
    for x, axis in ((a, 1), (b, 0)):
        powers = np.random.default_rng(3).integers(-12, 9, x.shape[axis])
        x *= np.exp2(np.expand_dims(powers, 1 - axis)).astype(x.dtype)


def cancels(a: np.ndarray, b: np.ndarray) -> None:
    """The first half of the sum is the second one's negative, but for a few terms."""
    half = a.shape[1] // 2
    a[:, half:], b[half:] = -a[:, :half], b[:half]
    a[:, 5::29] *= np.asarray(2**-9, a.dtype)


def tiny(a: np.ndarray, b: np.ndarray) -> None:
    """Operands, or products, that are not normal numbers, and zeros."""
    is_half = a.dtype == np.float16
    a *= np.asarray(2.0**-14 if is_half else 2.0**-126, a.dtype)
    b *= np.asarray(2.0**-13 if is_half else 2.0**-12, b.dtype)
    a[3] = 0
    b[:, ::5] *= np.asarray(2.0**9, b.dtype)


def huge(a: np.ndarray, b: np.ndarray) -> None:
    """Sums beyond the range of a float, if operands can have such."""
    a *= np.asarray(2.0**13 if a.dtype == np.float16 else 2.0**120, a.dtype)
    b *= np.asarray(2.0 ** (13 if a.dtype == np.float16 else 6), b.dtype)


def not_finite(a: np.ndarray, b: np.ndarray) -> None:
    a[1, 7], a[2, 9], a[3, 11], a[4, 20] = np.inf, -np.inf, np.nan, np.inf
    b[7, 3], b[20, 5], b[20, 6] = 0, -np.inf, np.nan


@pytest.mark.parametrize("change", [exponents_apart, cancels, tiny, huge, not_finite])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("target", "capability"), [(80, 80), (80, 89), (80, 90), (90, 90)])
@pytest.mark.usefixtures("unfenced_copies")
def test_tensor_cores_add_as_published(
    target: int,
    capability: int,
    dtype: str,
    change: Callable[[np.ndarray, np.ndarray], None],
    kernels: Any,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bits: mma, and wgmma of sm_90a code. Capability 9.0 adds otherwise than 8.0."""
    monkeypatch.setenv("EMULATED_GPU_CAPABILITY", str(capability))
    a, b = numbers(1, 64, 128, dtype=dtype), numbers(2, 128, 32, dtype=dtype)
    change(a, b)
    c = matmul(machine, kernels, target, (64, 32, 32, 4), a, b)
    of_80, of_90 = (add_products(np.zeros_like(c), a, b, gpu).view(np.uint32) for gpu in (80, 90))
    np.testing.assert_array_equal(c.view(np.uint32), of_80 if capability < 90 else of_90)
    assert (of_80 != of_90).any()


@pytest.mark.skipif(os.environ.get("XLA_GPU_TEST_ON") != "cuda", reason="asks a GPU")
@pytest.mark.parametrize("change", [exponents_apart, cancels])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [80, 90])
def test_a_gpu_adds_as_the_model(
    target: int, dtype: str, change: Callable[[np.ndarray, np.ndarray], None], kernels: Any
) -> None:
    """In bits, 65,536 sums of 8 products each: mma.sync, and wgmma of sm_90a code."""
    driver = Driver()
    if driver.capability < target:
        pytest.skip("this GPU does not run such code")
    a, b = numbers(1, 256, 128, dtype=dtype), numbers(2, 128, 256, dtype=dtype)
    change(a, b)
    c = matmul(driver, kernels, target, (64, 32, 32, 4), a, b)
    expected = add_products(np.zeros_like(c), a, b, driver.capability)
    np.testing.assert_array_equal(c.view(np.uint32), expected.view(np.uint32))


class Driver:
    """The driver of this machine's GPU, which runs PTX as the emulated GPU's library does."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.capability = 10 * major.value + minor.value

    def _call(self, name: str, *arguments: Any) -> None:
        assert getattr(self._cuda, name)(*arguments) == 0, name

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Runs a kernel. Arrays are copied to the GPU, and back."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        metadata, values, copies = kernel.metadata, [], []
        self._call("cuModuleLoadData", ctypes.byref(module), kernel.asm["ptx"].encode() + b"\0")
        name = metadata.name.encode()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name)
        shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, shared, metadata.shared)
        for x in arguments:
            if isinstance(x, np.ndarray):
                address, size = ctypes.c_void_p(), ctypes.c_size_t(x.nbytes)
                self._call("cuMemAlloc_v2", ctypes.byref(address), size)
                self._call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(x.ctypes.data), size)
                copies.append((x, address, size))
                values.append(address)
            else:
                values.append(ctypes.c_int32(x))
        values += [ctypes.c_void_p(), ctypes.c_void_p()]  # scratch that these kernels do not use
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        blocks, threads = (*grid, *[1] * (3 - len(grid))), (32 * metadata.num_warps, 1, 1)
        self._call("cuLaunchKernel", function, *blocks, *threads, metadata.shared, None, addresses,
                   None)  # fmt: skip
        self._call("cuCtxSynchronize")
        for x, address, size in copies:
            self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(x.ctypes.data), address, size)
            self._call("cuMemFree_v2", address)
        self._call("cuModuleUnload", module)


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
    machine: Any,
    kernel: Any,
    dtype: str,
    size: int,
    causal: bool,
    ptx: str | None = None,
    argument: Callable[[np.ndarray], Any] = np.asarray,
) -> tuple[str | None, np.ndarray, np.ndarray]:
    """The machine's error, its result and NumPy's."""
    length = 256
    q, k, v = (numbers(seed, length, size, dtype=dtype) for seed in range(3))
    output = np.full((length, size), np.nan, np.float32)
    scale = float(np.log2(np.e) / size**0.5)
    inputs = map(argument, (q, k, v))
    error = run(machine, kernel, (length // 64,), *inputs, output, scale, length, ptx=ptx)
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    expected = weights @ v.astype(np.float64) / weights.sum(axis=1, keepdims=True)
    return error, output, expected


@pytest.mark.pairwise
@pytest.mark.parametrize("first", [0, 3, -5, 40], ids=lambda first: f"first{first}")
@pytest.mark.parametrize(
    "box", [(64,), (8, 16), (16, 128), (4, 2, 32), (2, 4, 2, 16), (2, 2, 4, 4, 64)], ids=str
)
@pytest.mark.parametrize("dtype", BOX_DTYPES)
@pytest.mark.usefixtures("unfenced_barriers")
def test_copies_of_boxes(
    dtype: str, box: tuple[int, ...], first: int, kernels: Any, machine: Any
) -> None:
    """What lies outside of the tensor is zero."""
    signature = {"tensor": kernels.tensor(dtype, *box), "output": f"*{dtype}"}
    signature |= dict.fromkeys("abcde", "i32")
    size = int(np.prod(box))
    kernel = kernels.compiled(kernels.copy_box, 90, signature, {"SHAPE": box, "SIZE": size})
    shape = (*(n + 1 for n in box[:-1]), box[-1] + 16)
    tensor = np.random.default_rng(1).integers(1, 100, shape).astype(BOX_DTYPES[dtype])
    firsts = [0] * (5 - len(box)) + [(first + k) % 3 - 1 for k in range(len(box))]
    firsts[-1] = first
    output = np.full(box, 127, tensor.dtype)
    assert run(machine, kernel, (1,), Boxes(tensor), output, *firsts) is None
    np.testing.assert_array_equal(output, box_of(tensor, firsts[5 - len(box) :], box))


def box_of(tensor: np.ndarray, firsts: list[int], box: tuple[int, ...]) -> np.ndarray:
    at = np.indices(box) + np.reshape(firsts, (-1, *[1] * len(box)))
    sizes = np.reshape(tensor.shape, (-1, *[1] * len(box)))
    is_inside = ((at >= 0) & (at < sizes)).all(axis=0)
    return np.where(is_inside, tensor[tuple(np.clip(at, 0, sizes - 1))], 0)


@pytest.mark.pairwise
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("tile", [(64, 32, 32, 4), (64, 16, 16, 4), (128, 128, 64, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("unfenced_barriers")
def test_matmul_of_boxes(
    dtype: str, tile: tuple[int, ...], stages: int, kernels: Any, machine: Any
) -> None:
    """Swizzled in 32, 64 and 128 bytes."""
    m, n, k, num_warps = tile
    signature = {"a": kernels.tensor(dtype, m, k), "b": kernels.tensor(dtype, k, n), "c": "*fp32"}
    signature |= {"k_size": "i32", "c_row": "i32"}
    options = {"num_warps": num_warps, "num_stages": stages}
    kernel = kernels.compiled(
        kernels.matmul_of_boxes, 90, signature, {"M": m, "N": n, "K": k}, **options
    )
    # The last box reaches over the end of both.
    a, b = numbers(1, 2 * m, 4 * k - 8, dtype=dtype), numbers(2, 4 * k - 8, 2 * n, dtype=dtype)
    c = np.full((2 * m, 2 * n), np.nan, np.float32)
    assert run(machine, kernel, (2, 2), Boxes(a), Boxes(b), c, 4 * k, 2 * n) is None
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("unfenced_barriers")
def test_attention_of_boxes(dtype: str, size: int, stages: int, kernels: Any, machine: Any) -> None:
    signature = {name: kernels.tensor(dtype, 64, size) for name in ("query", "key", "value")} | {
        "output": "*fp32",
        "scale": "fp32",
        "length": "i32",
    }
    constants = {"D": size, "M": 64, "N": 64}
    kernel = kernels.compiled(
        kernels.attention_of_boxes, 90, signature, constants, num_stages=stages
    )
    error, output, expected = attend(machine, kernel, dtype, size, False, argument=Boxes)
    assert error is None
    np.testing.assert_allclose(output, expected, atol=0.02)


@pytest.mark.pairwise
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("equal_writes", "unfenced_barriers")
def test_matmul_with_a_warp_that_copies_boxes(
    dtype: str, columns: int, stages: int, kernels: Any, machine: Any
) -> None:
    kernel = pipelined_boxes(kernels, dtype, columns, stages)
    error, result, expected = multiply_boxes(machine, kernel, dtype, columns)
    assert error is None
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def pipelined_boxes(kernels: Any, dtype: str, columns: int, stages: int) -> Any:
    signature = {
        "a": kernels.swizzled_tensor(dtype, 64, 64),
        "b": kernels.swizzled_tensor(dtype, 64, columns),
        "c": "*fp32",
        "c_row": "i32",
        "num_tiles": "i32",
    }
    constants = {"M": 64, "N": columns, "K": 64, "STAGES": stages}
    return kernels.compiled(
        kernels.pipelined_matmul_of_boxes, 90, signature, constants, num_warps=4
    )


def multiply_boxes(
    machine: Any,
    kernel: Any,
    dtype: str,
    columns: int,
    ptx: str | None = None,
    swizzle: int | None = None,
) -> tuple[str | None, np.ndarray, np.ndarray]:
    """The machine's error, its result and NumPy's."""
    num_tiles = 5
    a = numbers(1, 128, 64 * num_tiles, dtype=dtype)
    b = numbers(2, 64 * num_tiles, 2 * columns, dtype=dtype)
    c = np.full((128, 2 * columns), np.nan, np.float32)
    tensors = Boxes(a, swizzle), Boxes(b)
    error = run(machine, kernel, (2, 2), *tensors, c, 2 * columns, num_tiles, ptx=ptx)
    return error, c, a.astype(np.float64) @ b.astype(np.float64)


@pytest.mark.usefixtures("unfenced_barriers")
def test_a_box_copied_over_what_was_there(kernels: Any, machine: Any) -> None:
    error, result, expected = replace_by_box(machine, box_over_ones(kernels))
    assert error is None
    np.testing.assert_array_equal(result, expected)


def box_over_ones(kernels: Any) -> Any:
    signature = {"tensor": kernels.swizzled_tensor("fp16", 32, 64), "output": "*fp16"}
    constants = {"ROWS": 32, "COLUMNS": 64}
    return kernels.compiled(kernels.copy_box_over_ones, 90, signature, constants, num_warps=4)


def replace_by_box(
    machine: Any, kernel: Any, ptx: str | None = None
) -> tuple[str | None, np.ndarray, np.ndarray]:
    """The machine's error, what the kernel has read, and what it must read."""
    tensor = numbers(1, 32, 64, dtype="fp16")
    output = np.full((2, 32, 64), np.nan, np.float16)
    error = run(machine, kernel, (1,), Boxes(tensor), output, ptx=ptx)
    return error, output, np.stack([np.ones_like(tensor), tensor])


# A change to the text of a kernel that copies boxes, and what the machine must say of it.
WAIT = r"mbarrier.try_wait\S+ complete, \S+ \S+;\s*@!complete bra.uni waitLoop;"
FAULTS = {
    "bytes of a box are not expected": (
        r"expect_tx(.*), 16384;",
        r"expect_tx\1, 8192;",
        r"a product reads .*, where a copy .* has not been waited for",
    ),
    "too few bytes are expected": (
        r"expect_tx(.*), 16384;",
        r"expect_tx\1, 16368;",
        r"a deadlock: the mbarrier at shared address \d+ has a surplus of 16 bytes",
    ),
    "too many bytes are expected": (
        r"expect_tx(.*), 16384;",
        r"expect_tx\1, 16400;",
        r"a deadlock: the mbarrier at shared address \d+ lacks 16 bytes",
    ),
    "a box is copied to the other box's place": (
        r"(?s)(bulk\.tensor\S+ )(\[%r\d+\])(.*bulk\.tensor\S+ )\[%r\d+\]",
        r"\1\2\3\2",
        r"a write at .*, where a copy .* has not been waited for",
    ),
    "a box is copied to the other half": (
        r"(bulk\.tensor\S+ \[%r\d+)\]",
        r"\1+4096]",
        r"where a copy .* has not been waited for|which was never written",
    ),
    "a box is the one at other coordinates": (r"\{(%r\d+), (%r\d+)\}", r"{\2, \1}", None),
    "a stage is freed before its product ends": (
        r"(?s)(wgmma.wait_group.sync.aligned 0;)(.*?mbarrier.arrive.shared\S+ _, \S+;)",
        r"\2\1",
        r"a product reads .*, (where a copy .* has not been waited for|which a tensor copy wrote)"
        r"|a race: a write .* not in order with a read",
    ),
    "a stage is read before it is filled": (
        WAIT,
        "",
        r"a product reads .*, (where a copy .* has not been waited for|which was never written)",
    ),
    "a wait is not repeated": (
        "@!complete bra.uni waitLoop;",
        "",
        r"a product reads .*, (where a copy .* has not been waited for|which was never written)"
        r"|a race",
    ),
    "a stage is filled before it is freed": (
        rf"(?s)({WAIT}.*){WAIT}",
        r"\1",
        r"a copy .* has not been waited for|a race|a product reads .*, which a tensor copy wrote"
        r"|more arrivals than the mbarrier expects",
    ),
    "copies are waited for at another barrier": (
        r"(bulk\.tensor\S+ .*\{.*\}\], \[%r\d+)\]",
        r"\1+16]",
        r"a deadlock: the mbarrier at shared address \d+ lacks 8192 bytes",
    ),
    "a barrier has no fence": (r"fence.mbarrier_init.release.cluster;", "", "mbarrier_init after"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("equal_writes")
def test_a_fault_of_a_warp_that_copies_boxes_is_found(
    fault: str, kernels: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the fault, the same text passes by all rules."""
    kernel = pipelined_boxes(kernels, "fp16", 64, 2)
    ptx = re.sub(
        r"(mbarrier.init.*)", r"\1 fence.mbarrier_init.release.cluster;", kernel.asm["ptx"]
    )
    change, by, said = FAULTS[fault]
    faulty, changes = re.subn(change, by, ptx, count=0 if "init" in change else 1)
    assert changes > 0
    for seed in range(4):
        monkeypatch.setenv("EMULATED_GPU_SEED", str(seed))
        error, result, expected = multiply_boxes(machine, kernel, "fp16", 64, ptx)
        assert error is None
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)
        error, result, _ = multiply_boxes(machine, kernel, "fp16", 64, faulty)
        if said is None:
            assert error is None
            assert not np.allclose(result, expected, rtol=1e-2, atol=1e-2)
        else:
            assert error is not None
            assert re.search(said, error), error


# What makes the kernels' copies and products wait for each other.
WAITS = ["bar.sync", "barrier.sync", "cp.async.wait_group", "cp.async.mbarrier", "mbarrier.arrive"]
WAITS += ["wgmma.wait_group", "wgmma.fence", "fence.proxy.async"]


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.usefixtures("unfenced_copies")
def test_a_missing_wait_is_found(target: int, kernels: Any, machine: Any, step: int) -> None:
    kernel = attention(kernels, target, "fp16", 64, False)
    check_missing_waits(
        kernel.asm["ptx"],
        lambda ptx: attend(machine, kernel, "fp16", 64, False, ptx),
        atol=0.02,
        step=step,
    )


@pytest.mark.usefixtures("equal_writes", "unfenced_barriers")
def test_a_missing_wait_of_a_warp_that_copies_boxes_is_found(
    kernels: Any, machine: Any, step: int
) -> None:
    kernel = pipelined_boxes(kernels, "fp16", 64, 2)
    check_missing_waits(
        kernel.asm["ptx"],
        lambda ptx: multiply_boxes(machine, kernel, "fp16", 64, ptx),
        atol=1e-3,
        step=step,
    )


@pytest.mark.usefixtures("unfenced_barriers")
def test_a_missing_wait_of_a_box_is_found(kernels: Any, machine: Any, step: int) -> None:
    kernel = box_over_ones(kernels)
    ptx = kernel.asm["ptx"]
    check_missing_waits(ptx, lambda text: replace_by_box(machine, kernel, text), atol=0, step=step)
    for change, by, said in [
        ("fence.proxy.async.shared::cta;", "", "wrote without fence.proxy.async before the copy"),
        (WAIT, "", "a read .*, where a copy .* has not been waited for"),
        (WAIT, "ret;", "the thread block ends before its tensor copies have arrived"),
    ]:
        faulty, changes = re.subn(change, by, ptx)
        assert changes == 1
        error, *_ = replace_by_box(machine, kernel, faulty)
        assert error is not None
        assert re.search(said, error), error


@pytest.mark.usefixtures("equal_writes", "unfenced_barriers")
def test_boxes_with_another_swizzle_make_another_product(kernels: Any, machine: Any) -> None:
    kernel = pipelined_boxes(kernels, "fp16", 64, 2)
    for swizzle, is_right in ((3, True), (0, False)):
        error, result, expected = multiply_boxes(machine, kernel, "fp16", 64, swizzle=swizzle)
        assert error is None
        assert np.allclose(result, expected, rtol=1e-4, atol=1e-3) == is_right


@pytest.mark.usefixtures("unfenced_barriers")
def test_a_tensor_that_the_kernel_writes_is_not_copied(kernels: Any, machine: Any) -> None:
    array = np.ones((64, 64), np.float16)
    error = run(machine, box_over_ones(kernels), (1,), Boxes(array[:32]), array)
    assert error is not None
    assert "a tensor copy of what the kernel has written" in error


COPY = r"\.shared::cluster\.global(\.mbarrier::complete_tx::bytes)( .*);"


@pytest.mark.parametrize(
    ("change", "by", "said"),
    [
        (COPY, r".shared::cta.global.tile\1\2;", None),
        (COPY, r".shared::cluster.global\1.L2::cache_hint\2, %rd1;", None),
        (r"(@%p\d+ cp.async.bulk.*\[(%rd\d+),)", r"prefetch.tensormap [\2]; \1", None),
        (
            r"(@%p\d+ mbarrier)\.arrive.expect_tx.*(\[%r\d+\]), 4096;",
            r"\1.expect_tx.relaxed.cta.shared::cta.b64 \2, 4112;"
            r"\1.complete_tx.relaxed.cta.shared::cta.b64 \2, 16; \1.arrive.shared.b64 _, \2;",
            None,
        ),
        (r"(expect_tx.*), 4096;", r"\1, 1048576;", "an mbarrier that expects 1048576 bytes"),
        (COPY, r".shared::cluster.global\1.multicast::cluster\2, 1;", "unknown instruction cp"),
        (COPY, r".shared::cluster.global.im2col\1\2;", "unknown instruction cp"),
        (COPY, r".global.shared::cta.bulk_group\2;", "unknown instruction cp"),
        (r"bulk\.tensor\.2d", "bulk.tensor.3d", "a copy of 3 dimensions by a tensor map of 2"),
        (r"(bulk.tensor\S+ \[%r\d+)\]", r"\1+64]", "which is no multiple of 128"),
        (r"(bulk.tensor.*\[%rd\d+),", r"\1+32,", "a tensor map at address .* no multiple of 64"),
        (r"arrive.expect_tx", r"arrive.expect_tx.relaxed.cta", "unknown instruction mbarrier"),
        (r"fence.proxy.async", r"fence.proxy.alias", "unknown instruction fence"),
        (r"fence.proxy.async.shared::cta", r"fence.proxy.async.global", "wrote without fence"),
    ],
)
@pytest.mark.usefixtures("unfenced_barriers")
def test_what_copies_of_boxes_may_say(
    change: str, by: str, said: str | None, kernels: Any, machine: Any
) -> None:
    """What the machine does not know, it refuses by name."""
    kernel = box_over_ones(kernels)
    ptx, changes = re.subn(change, by, kernel.asm["ptx"])
    assert changes == 1
    error, result, expected = replace_by_box(machine, kernel, ptx)
    if said is None:
        assert error is None
        np.testing.assert_array_equal(result, expected)
    else:
        assert error is not None
        assert re.search(said, error), error


@pytest.mark.usefixtures("equal_writes")
def test_a_missing_wait_of_warps_that_copy_is_found(kernels: Any, machine: Any, step: int) -> None:
    kernel = pipelined(kernels, "fp16", 64, 2, 1)
    check_missing_waits(
        kernel.asm["ptx"],
        lambda ptx: multiply(machine, kernel, "fp16", 64, ptx),
        atol=1e-3,
        step=step,
    )


def check_missing_waits(
    ptx: str,
    compute: Callable[[str], tuple[str | None, np.ndarray, np.ndarray]],
    atol: float,
    step: int,
) -> None:
    """Removes each barrier, wait and fence of a kernel, one at a time, or each `step`-th."""
    error, result, expected = compute(ptx)
    assert error is None
    np.testing.assert_allclose(result, expected, atol=atol)
    lines = ptx.split("\n")
    places = [n for n, line in enumerate(lines) if any(wait in line for wait in WAITS)]
    missed = []
    for place in places[::step]:
        error, result, _ = compute("\n".join([*lines[:place], *lines[place + 1 :]]))
        if error is None and np.allclose(result, expected, atol=atol):
            missed.append(lines[place].strip())
    print(len(places), "places, missed:", missed)
    assert len(missed) <= len(places) // 3, missed
