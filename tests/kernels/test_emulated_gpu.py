"""What the tests of the CUDA kernels do not cover by themselves: what the PTX costs, kernels of all
head sizes, for Ampere and for Hopper, and kernels without one of their waits."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.compare import assert_close_on_cuda
from tests.cases.case import Case
from tests.support import native, selection
from tests.support.gpu import EmulatedGpu, attend, captured, tensor_map

takes_minutes = pytest.mark.skipif(not selection.everything, reason="takes minutes: --all")


@pytest.mark.parametrize(
    "sequences", [((1, 900), (1, 500)), ((200, 700),)], ids=["decode", "prefill"]
)
@pytest.mark.parametrize("kernels", ["portable", "by GPU"])
def test_shared_memory_has_hardly_any_bank_conflicts(
    kernels: str, sequences: Any, emulated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(id="counts", sequences=sequences, num_heads=16, num_kv_heads=4, head_size=128,
                dtype="bfloat16")  # fmt: skip
    counts = tmp_path / "counts"
    monkeypatch.setenv("EMULATED_GPU_COUNTS", str(counts))
    attend(EmulatedGpu(emulated, kernels), case.inputs(), **case.attributes())
    launches = [json.loads(line) for line in counts.read_text().splitlines()]
    assert sum(launch["instructions"].get("products", 0) for launch in launches) > 0
    accesses, wavefronts = (
        sum(launch[f"shared_{name}"] for launch in launches) for name in ("accesses", "wavefronts")
    )
    assert wavefronts <= 1.01 * accesses


@pytest.fixture
def count(emulated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Computes sequences with the portable kernels. Returns what one of them executed: if its name is
    not given, that for the first sequence."""
    path = tmp_path / "counts"
    monkeypatch.setenv("EMULATED_GPU_COUNTS", str(path))

    def count(*sequences: tuple[int, int], seed: int = 1, kv_heads: int = 1, name: str = "") -> Any:
        path.write_text("")
        case = Case(id="counts", sequences=sequences, num_heads=4 * kv_heads, num_kv_heads=kv_heads,
                    head_size=128, block_size=16, dtype="bfloat16", padding_tokens=0)  # fmt: skip
        attend(EmulatedGpu(emulated), case.inputs(), **case.attributes(), seed=seed)
        launches = [json.loads(line) for line in path.read_text().splitlines()]
        if not name:
            name = "TensorCorePrefill" if 4 * sequences[0][0] > 64 else "TensorCoreAttention"
        (kernel,) = [x for x in launches if name in x["kernel"]]
        return kernel | {"total": sum(kernel["instructions"].values())}

    return count


@pytest.mark.parametrize("q_len", [32, 16], ids=["128-rows", "64-rows"])
def test_an_item_takes_few_instructions_outside_its_tiles(q_len: int, count: Any) -> None:
    """Its warps together execute as many as for two tiles, the mutants' code included. The first
    tile of a leaf finds a reference, and the last tile of the item has masks."""
    one = count((q_len, 128))["total"]
    tile = count((q_len, 256))["total"] - count((q_len, 192))["total"]
    assert tile > 1000
    assert count((q_len, 128), (q_len, 128))["total"] - one - 2 * tile <= 8500


def test_a_decode_item_takes_few_instructions(count: Any) -> None:
    """One with 256 positions: of all warps together, and with its share of what happens once in a
    call, and of merging."""
    splits, kv_heads = 32, 8
    total = count((1, splits * 256), kv_heads=kv_heads, name="DecodeAttention")["total"]
    assert total <= 11200 * splits * kv_heads


def test_a_plain_turn_reads_k_and_v_once_for_two_groups_of_rows(count: Any) -> None:
    """A warp has 32 rows of a tile of 64 positions: per 128 rows and tile, 4 warps read K and V with
    64 instructions each, and the query with 16. With 16 rows a warp it would be 576."""
    more, less = (count((32, context))["instructions"] for context in (256, 192))
    assert more["products"] - less["products"] == 4 * 256
    assert more["matrices"] - less["matrices"] == 4 * 80
    assert sum(more.values()) - sum(less.values()) <= 5000


@pytest.mark.parametrize(("seed", "blocks", "q_len"), [(2, 3, 520), (3, 4, 776)])
def test_thread_blocks_have_equal_shares(seed: int, blocks: int, q_len: int, count: Any) -> None:
    """Their items are the splits of a sequence, three and four for each query tile. Dealt in one
    direction, the first splits, which most rows attend to, would be one block's: 1.28 shares."""
    kernel = count((q_len, q_len), seed=seed)
    assert kernel["blocks"] == blocks
    assert kernel["longest_block"] * blocks <= 1.05 * kernel["total"]


@takes_minutes
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_all_head_sizes(capability: int) -> None:
    architecture = {80: "80-real", 90: "90a-real"}[capability]
    module = native.for_emulated_gpu(
        native.ROOT / "build/emulated" / architecture,
        f"-DXLA_GPU_ARCHITECTURES={architecture}",
        "-DXLA_GPU_CPU_INSTRUCTION_SETS=baseline",
    )
    files = ("test_cuda_kernel.py", "test_cuda_errors.py", "test_one_order.py")
    run_tests(module, *files, capability=capability)


def run_tests(module: Path, *files: str, matching: str = "", capability: int = 90) -> None:
    """Runs the tests of these files whose names match, on a module."""
    outcome = native.run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--emulated", module, "--all"),
        *(*(Path(__file__).with_name(name) for name in files), "-k", matching),
        environment={"XLA_GPU_TEST_CAPABILITY": str(capability)},
    )
    assert outcome.returncode == 0, outcome.stdout
    assert re.search(r"[1-9]\d* passed", outcome.stdout)


@takes_minutes
@pytest.mark.parametrize(
    ("variant", "matching"),
    [
        (  # splits_of_long_queries reads the arrivals
            "nonces",
            "(comes_last or 500_calls or any_batch or splits or paged_attention_on_hopper)"
            " and not splits_of_long_queries",
        ),
        (
            "stale-largest",
            "paged_attention_on_hopper or long_queries or tensor_copies or extreme or infinite"
            " or any_batch or hopper_kernel or groups_of_kv_heads or more_kv_tiles or graph",
        ),
    ],
)
def test_a_build_to_measure(variant: str, matching: str) -> None:
    """It has the right results, too, and the same bits in any batch and over any scratch."""
    lab = json.loads((native.ROOT / "benchmarks/gpu/lab.json").read_text())
    module = native.for_emulated_gpu(
        native.ROOT / "build/emulated" / variant,
        *("-DXLA_GPU_ARCHITECTURES=90a-real", "-DXLA_GPU_CPU_INSTRUCTION_SETS=baseline"),
        *("-DXLA_GPU_HEAD_SIZES=128;256", "-DXLA_GPU_HEAD_SIZES_OF_8_BITS=128"),
        flags=f"-D{lab['variants'][variant]['definition']}",
    )
    run_tests(module, "test_cuda_kernel.py", matching=matching)


@pytest.fixture(scope="module")
def machine() -> Any:
    return ctypes.CDLL(str(native.emulated_gpu() / "libemulated_gpu_ptx.so"))


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


@pytest.fixture(scope="module")
def copy_pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = tmp_path_factory.mktemp("pages") / "copy_pages.so"
    outcome = native.run(
        *("bash", native.ROOT / "tests/emulated_gpu/nvcc", "-std=c++17", "-shared"),
        *("-gencode", "arch=compute_90a,code=[sm_90a]", "-Xcompiler=-fPIC", "-cudart", "none"),
        *(Path(__file__).parent / "copy_pages.cu", "-o", library),
        native.emulated_gpu() / "libemulated_gpu.a",
        environment={"EMULATED_GPU_NVCC": str(native.nvcc())},
    )
    assert outcome.returncode == 0, outcome.stdout
    return ctypes.CDLL(str(library))


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


# Kernels, and what chooses them.
KERNELS = {
    "TensorCoreAttention": "portable",
    "TensorCorePrefill": "portable",
    "Combine": "portable",
    "PrefillAttention": "by GPU",
    "DecodeAttention": "portable",
}


@takes_minutes
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_missing_wait_is_found(
    kernel: str, emulated: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each barrier, wait and fence of a kernel is removed, one at a time. Without that, the same
    calls pass."""
    gpu = EmulatedGpu(emulated, KERNELS[kernel])
    cases = [
        Case(id="faults", sequences=sequences, num_heads=4, head_size=128, dtype="bfloat16")
        for sequences in [((1, 900), (70, 200)), ((1, 70), (1, 700), (3, 5))]
    ]
    monkeypatch.setenv("EMULATED_GPU_MOST_INSTRUCTIONS", "3000000")  # of a thread block
    calls = [(case.inputs(), case.attributes()) for case in cases]

    def run_all() -> str | None:
        for (inputs, attributes), seed in itertools.product(calls, (1, 2)):
            try:
                result = attend(gpu, inputs, **attributes, seed=seed)
                assert_close_on_cuda(result, inputs, attributes)
            except (RuntimeError, AssertionError) as error:
                return str(error)
        return None

    assert run_all() is None
    found, missed = [], []
    for number in itertools.count():
        monkeypatch.setenv("EMULATED_GPU_FAULT", f"{kernel} {number}")
        error = run_all()
        if error is not None and "no such wait" in error:  # all were removed
            break
        said = capfd.readouterr().err
        if "reached" in said:  # by these calls
            (found if error else missed).append(said.split("\n")[0])
    assert found and len(missed) <= len(found), missed
