"""What the tests of the CUDA kernels do not cover by themselves: what the PTX costs, kernels of all
head sizes, for Ampere and for Hopper, and kernels without one of their waits."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.compare import assert_close_on_cuda
from tests.cases.case import Case
from tests.support import native, selection
from tests.support.gpu import EmulatedGpu, attend

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

    def count(*sequences: tuple[int, int], seed: int = 1, kv_heads: int = 1, name: str = "",
              heads: int = 4, shared_blocks: int = 0) -> Any:  # fmt: skip
        path.write_text("")
        case = Case(id="counts", sequences=sequences, num_heads=heads * kv_heads,
                    num_kv_heads=kv_heads, head_size=128, block_size=16, dtype="bfloat16",
                    padding_tokens=0, shared_blocks=shared_blocks)  # fmt: skip
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


@pytest.mark.parametrize(
    ("heads", "once", "sectors"), [(1, 16, 0.55), (4, 4, 0.67), (16, 1, 1.01)], ids=str
)
def test_neighbours_read_once_what_they_have_in_common(
    heads: int, once: int, sectors: float, count: Any
) -> None:
    """Half of 2,048 positions, for as many sequences as a work item has rows for. What is read for one
    sequence alone leaves the L2 cache to the rest, unless nothing is in common."""
    fields = {"name": "DecodeAttention", "heads": heads}
    alone = count(*[(1, 2048)] * 16, **fields)
    shared = count(*[(1, 2048)] * 16, **fields, shared_blocks=64)
    assert shared["global_sectors"] <= sectors * alone["global_sectors"]
    assert alone["evict_first_sectors"] == 0
    row = 2 * 128 * 2 // 32  # sectors of a position's K and V
    assert shared["evict_first_sectors"] == 16 * 1024 * row
    assert shared["global_sectors"] >= (16 + 16 // once) * 1024 * row


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


VARIANTS = json.loads((native.ROOT / "tools/lease/lab.json").read_text())["variants"]


@takes_minutes
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_build_to_measure_compiles(variant: str, tmp_path: Path) -> None:
    settings = next(native.ROOT.glob("build/*/generated/cuda_build.h"), None)
    if settings is None:
        pytest.skip("no build with CUDA kernels")
    (source,) = (native.ROOT / "shared_ffi/csrc/paged_attention/cuda/decode").glob("*.cu")
    unit = {
        "CACHE": "BFloat16",
        "STORAGE": "BFloat16",
        "HEAD_SIZE": "128",
        "KIB": "kAnyMultiprocessor",
    }
    outcome = native.run(
        *(native.nvcc(), "-ptx", "-std=c++17", "-arch=compute_90a", f"-I{settings.parent}"),
        *(f"-DXLA_GPU_{name}={value}" for name, value in unit.items()),
        *(f"-D{VARIANTS[variant]['definition']}", source, "-o", tmp_path / "unit.ptx"),
    )
    assert outcome.returncode == 0, outcome.stdout


@takes_minutes
def test_a_build_to_measure() -> None:
    """The variant without tensor maps has the right results, too, and the same bits."""
    module = native.for_emulated_gpu(
        native.ROOT / "build/emulated/threads",
        *("-DXLA_GPU_ARCHITECTURES=90a-real", "-DXLA_GPU_CPU_INSTRUCTION_SETS=baseline"),
        "-DXLA_GPU_KERNELS=tested",
        flags=f"-D{VARIANTS['threads']['definition']}",
    )
    run_tests(module, "test_cuda_kernel.py", matching="paged_attention_on_hopper or any_batch")


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
