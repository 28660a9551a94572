"""The CUDA runtime and driver of the emulated GPU: tensor maps, graphs, counts, and calls that fail."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.emulated_gpu import build
from tools.emulated_gpu.calls import captured, tensor_map


@pytest.fixture(scope="module")
def machine() -> Any:
    return ctypes.CDLL(str(build.libraries() / "libemulated_gpu_ptx.so"))


INVALID, UNKNOWN = 1, 801
TENSOR_MAPS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (0, {"swizzle": 3, "box": (1, 256, 64)}),
    (0, {"swizzle": 2, "box": (1, 256, 32)}),
    (0, {"swizzle": 1, "box": (1, 256, 16)}),
    (0, {"box": (1, 256, 128)}),
    (0, {"type": 9, "promotion": 3}),
    (0, {"rank": 2, "sizes": (2**32, 2**32), "strides": (2**40 - 16,), "box": (8, 8)}),
    (INVALID, {"to": 4096 + 32}),
    (INVALID, {"address": 4096 + 8}),
    (INVALID, {"rank": 0}),
    (INVALID, {"rank": 6}),
    (INVALID, {"type": 16}),
    (INVALID, {"sizes": (3, 0, 64)}),
    (INVALID, {"sizes": (3, 2**32 + 1, 64)}),
    (INVALID, {"strides": (4096, 136)}),
    (INVALID, {"strides": (2**40, 128)}),
    (INVALID, {"box": (1, 0, 64)}),
    (INVALID, {"box": (1, 257, 64)}),
    (INVALID, {"box": (1, 8, 12)}),
    (INVALID, {"swizzle": 3, "box": (1, 8, 72)}),
    (INVALID, {"swizzle": 2, "box": (1, 8, 40)}),
    (INVALID, {"swizzle": 1, "box": (1, 8, 24)}),
    (INVALID, {"steps": (1, 9, 1)}),
    (INVALID, {"steps": (0, 1, 1)}),
    (INVALID, {"type": 1, "fill": 1}),
    (INVALID, {"interleave": 3}),
    (INVALID, {"swizzle": 7}),
    (INVALID, {"promotion": 4}),
    (INVALID, {"fill": 2}),
    (UNKNOWN, {"steps": (1, 2, 1)}),
    (UNKNOWN, {"swizzle": 3, "box": (1, 8, 32)}),
    (UNKNOWN, {"swizzle": 4}),
    (UNKNOWN, {"interleave": 1}),
    (UNKNOWN, {"type": 11}),
    (UNKNOWN, {"type": 13}),
    (UNKNOWN, {"fill": 1}),
]


@pytest.mark.parametrize(("error", "changes"), TENSOR_MAPS, ids=str)
def test_tensor_maps_are_refused_as_by_the_driver(
    error: int, changes: dict[str, Any], machine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """And with another error, by name, if they are not known."""
    array = np.zeros((3, 20, 64), np.float16)
    assert tensor_map(machine, array, **{"box": (1, 16, 64)} | changes)[0] == error
    assert ("is not known" in capfd.readouterr().err) == (error == UNKNOWN)


def test_gpus_before_hopper_have_no_tensor_maps(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_GPU_CAPABILITY", "89")
    assert tensor_map(machine, np.zeros((8, 64), np.float16), (8, 64))[0] == UNKNOWN


def compiled(name: str, folder: Path) -> Any:
    """A library of a file beside this one."""
    if (compiler := build.nvcc()) is None:
        pytest.skip("no nvcc, which compiles the kernel to PTX")
    library = folder / f"{name}.so"
    build.compile_library(compiler, Path(__file__).with_name(f"{name}.cu"), library, "90a")
    return ctypes.CDLL(str(library))


def test_a_program_of_somebody_else(tmp_path: Path) -> None:
    """It has the right sums, and without its barriers an error that names the race."""
    library = compiled("sums", tmp_path)
    library.SumsOf.restype = ctypes.c_char_p
    numbers = np.random.default_rng(0).integers(0, 100, (5, 64)).astype(np.float32)
    sums = np.full(5, np.nan, np.float32)
    from_, to = (ctypes.c_void_p(x.ctypes.data) for x in (numbers, sums))
    assert library.SumsOf(from_, 5, to, True) is None
    np.testing.assert_array_equal(sums, numbers.sum(axis=1))
    error = library.SumsOf(from_, 5, to, False)
    assert re.search("race|never written", error.decode()), error


@pytest.fixture(scope="module")
def copy_pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled("copy_pages", tmp_path_factory.mktemp("pages"))


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that a GPU would give it: NumPy's own may lie across two sectors."""
    bytes_ = np.empty(array.nbytes + 256, np.uint8)
    bytes_ = bytes_[-bytes_.ctypes.data % 256 :][: array.nbytes]
    copy = bytes_.view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


PAGES = aligned(np.array([3, 7, -1, 19, 0, 20, 2**31 - 1, 5], np.int32))


class CopyPages:
    """A copy of a cache's pages. `copied` is `expected` when it is done: pages that do not exist are
    zeros, and the 16-byte units of 8 rows are exchanged."""

    def __init__(self, pages: np.ndarray = PAGES, seed: int = 0) -> None:
        values = np.random.default_rng(seed).integers(1, 1 << 16, (20, 16, 3, 128))
        self.pages = pages
        self.cache = aligned(values.astype(np.uint16))
        self.copied = aligned(np.zeros((2, 128, 8, 8), np.uint16))

    def run(
        self, library: Any, in_memory: bool = False, fences: bool = False, stream: int = 0
    ) -> int:
        """Returns the error of a call of the runtime, or 0."""
        arrays = (self.cache, self.pages, self.copied)
        from_, numbers, to = (ctypes.c_void_p(x.ctypes.data) for x in arrays)
        sizes = ctypes.c_uint64(20), ctypes.c_uint64(3)
        on = ctypes.c_void_p(stream)
        return library.Run(from_, *sizes, numbers, 1, to, in_memory, fences, on)

    @property
    def expected(self) -> np.ndarray:
        zeros = np.zeros_like(self.cache[0, :, 1])
        rows = [self.cache[page, :, 1] if 0 <= page < 20 else zeros for page in self.pages]
        expected = np.concatenate(rows).reshape(128, 2, 8, 8).swapaxes(0, 1)
        for row in range(128):
            expected[:, row] = expected[:, row][:, np.arange(8) ^ row % 8]
        return expected


@pytest.mark.parametrize(("in_memory", "fences"), [(False, False), (True, True)])
def test_pages_are_copied_by_a_tensor_map(in_memory: bool, fences: bool, copy_pages: Any) -> None:
    copy = CopyPages()
    assert copy.run(copy_pages, in_memory, fences) == 0
    np.testing.assert_array_equal(copy.copied, copy.expected)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_graph_keeps_arguments_but_no_memory(in_memory: bool, copy_pages: Any) -> None:
    """A map that the host has overwritten since the call was captured brings other pages."""
    copy, other = CopyPages(), CopyPages(seed=1)
    with captured(copy_pages, partial(copy.run, copy_pages, in_memory, in_memory)) as replay:
        assert not copy.copied.any()
        assert other.run(copy_pages) == 0
        copy.cache[...] += 1
        replay()
    pages_of = other if in_memory else copy
    np.testing.assert_array_equal(copy.copied, pages_of.expected)
    assert (copy.expected != other.expected).any()


INVALID_HANDLE, STATE, UNSUPPORTED, INVALIDATED, IMPLICIT = 400, 401, 900, 901, 906


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda library, stream: library.cudaStreamSynchronize(stream), UNSUPPORTED),
        (lambda library, _: library.cudaStreamSynchronize(None), IMPLICIT),
        (lambda library, _: CopyPages().run(library), IMPLICIT),
    ],
    ids=["synchronize", "synchronize-default", "launch-on-default"],
)
def test_what_ends_a_capture(call: Callable[..., int], error: int, copy_pages: Any) -> None:
    """A call that waits, and work on the legacy default stream, which other streams wait for. What
    was captured is lost."""
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert copy_pages.cudaStreamCreate(ctypes.byref(stream)) == 0
    assert stream.value is not None
    assert copy_pages.cudaStreamBeginCapture(None, 0) == UNSUPPORTED
    for _ in range(2):  # the stream can capture again
        assert is_capturing(copy_pages, stream) == (0, 0)
        assert copy_pages.cudaStreamBeginCapture(stream, 0) == 0
        assert copy_pages.cudaStreamBeginCapture(stream, 0) == STATE
        assert is_capturing(copy_pages, stream) == (0, 1)
        assert is_capturing(copy_pages, None)[0] == IMPLICIT
        copy = CopyPages()
        assert copy.run(copy_pages, stream=stream.value) == 0
        assert call(copy_pages, stream) == error
        assert is_capturing(copy_pages, stream) == (0, 2)
        assert copy.run(copy_pages, stream=stream.value) == INVALIDATED
        assert copy_pages.cudaStreamEndCapture(stream, ctypes.byref(graph)) == INVALIDATED
        assert graph.value is None
        assert copy_pages.cudaStreamEndCapture(stream, ctypes.byref(graph)) == STATE
        assert not copy.copied.any()
        assert copy.run(copy_pages) == 0
        assert copy.run(copy_pages, stream=stream.value) == 0
    assert copy_pages.cudaStreamDestroy(stream) == 0
    assert copy.run(copy_pages, stream=stream.value) == INVALID_HANDLE


def is_capturing(library: Any, stream: ctypes.c_void_p | None) -> tuple[int, int]:
    """The error, and 1 if the stream is capturing, or 2 if that has failed."""
    status = ctypes.c_int()
    return library.cudaStreamIsCapturing(stream, ctypes.byref(status)), status.value


def test_tensor_copies_are_counted(
    copy_pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of 8 pages do not exist. Their numbers are copied, too."""
    monkeypatch.setenv("EMULATED_GPU_COUNTS", str(tmp_path / "counts"))
    assert CopyPages().run(copy_pages) == 0
    launch = json.loads((tmp_path / "counts").read_text())
    tile = 8 * 16 * 256
    assert launch["global_bytes"] == tile * 5 // 8 + 32 + tile  # the last by plain stores
    assert launch["global_sectors"] == launch["global_bytes"] // 32
    # Written by copies, and read; and the numbers by a warp.
    assert launch["shared_accesses"] == 2 * tile // 128 + 2
    assert launch["instructions"]["copies"] == 2


@pytest.mark.parametrize(
    ("copy", "in_memory", "said"),
    [
        (CopyPages(), True, "a tensor map in global memory without fence.proxy.tensormap"),
        (
            CopyPages(np.pad(PAGES, (1, 0))[1:]),
            False,
            "a copy from global address .*, which is no mult",
        ),
    ],
    ids=["no-fence", "misaligned"],
)
def test_faults_of_copies_by_nvcc_are_found(
    copy: CopyPages, in_memory: bool, said: str, copy_pages: Any
) -> None:
    error = copy.run(copy_pages, in_memory)
    assert error != 0
    copy_pages.Message.restype = ctypes.c_char_p
    assert re.search(said, copy_pages.Message(error).decode())


@pytest.mark.parametrize("call", ["cudaGetDriverEntryPoint", "cuTensorMapEncodeTiled"])
def test_calls_that_make_tensor_maps_can_fail(
    call: str, copy_pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_GPU_FAIL", f"{call}=7")
    assert CopyPages().run(copy_pages) == 7
