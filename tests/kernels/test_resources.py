"""The compiler's report on the CUDA kernels, and the CUDA calls of the host code."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from shared_ffi import _native
from tests.support import native
from tests.support.native import ROOT

CSRC = ROOT / "shared_ffi/csrc"
SMALLEST_SHARED_BYTES = 99 * 1024  # the limit of a thread block on sm_86, sm_89 and sm_120
HOPPER_SHARED_BYTES = 227 * 1024  # on sm_90


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """The build's table of kernels (cmake/resources.py)."""
    tables = sorted(ROOT.glob("build/*/resources.json"), key=lambda path: path.stat().st_mtime)
    if not tables:
        pytest.skip("no build folder with a resource table: pip install --editable leaves one")
    entries: list[dict[str, Any]] = json.loads(tables[-1].read_text())
    return entries


def test_every_kernel_is_in_the_table(kernels: list[dict[str, Any]]) -> None:
    tensor_core = {
        (entry["storage"], entry["size"])
        for entry in kernels
        if entry["kernel"] == "TensorCoreAttention"
    }
    sizes = (64, 80, 96, 112, 128, 192, 256)
    assert tensor_core == {(storage, n) for storage in ("float16", "bfloat16") for n in sizes}
    hopper = {
        (entry["storage"], entry["size"], entry["target"])
        for entry in kernels
        if entry["kernel"] == "HopperAttention"
    }
    assert hopper == {(storage, n, "90a") for storage in ("float16", "bfloat16") for n in (64, 128)}
    names = {entry["kernel"] for entry in kernels} - {"TensorCoreAttention", "HopperAttention"}
    assert names == {"CudaCoreAttention", "Finish", "Update", "Add"}


def test_no_kernel_spills_registers(kernels: list[dict[str, Any]]) -> None:
    """No register is spilled, and no local array lies in memory."""
    assert [entry for entry in kernels if entry["spill_bytes"] or entry["stack_bytes"]] == []


def test_ptxas_warns_of_no_lost_speed(kernels: list[dict[str, Any]]) -> None:
    """ptxas prints (C75xx) where it ignores setmaxnreg or serializes products."""
    reports = [path.read_text() for path in ROOT.glob("build/*/**/*.ptxas")]
    assert len(reports) > 1
    assert [line for report in reports for line in re.findall(r".*\(C75\d\d\).*", report)] == []


def test_the_build_shows_the_warnings_of_ptxas() -> None:
    loss = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored"
    usage = "ptxas info    : Used 168 registers"
    script = f'echo "{loss}" >&2; echo "{usage}" >&2'
    outcome = native.run(sys.executable, ROOT / "cmake/resources.py", "sh", "-c", script)
    assert outcome.stdout.splitlines() == [loss]


def test_the_compiler_fuses_no_products_by_itself() -> None:
    """Fused products are written as gpu::Fma, so that kernels that share a function agree in bits,
    and the emulated GPU agrees with them."""
    edges = [
        edge
        for path in ROOT.glob("build/*/build.ninja")
        for edge in path.read_text().split("\n\n")
        if re.search(r"^build \S+\.cu\.o:", edge, re.MULTILINE)
    ]
    if not edges:
        pytest.skip("no build folder with CUDA objects: pip install --editable leaves one")
    flag = {"CUDA": "-fmad=false", "CXX": "-ffp-contract=off"}
    for edge in edges:
        language = re.search(r"\.cu\.o: (CUDA|CXX)_COMPILER", edge)
        assert language is not None, edge
        assert re.search(rf" {flag[language[1]]}(\s|$)", edge), edge


def test_a_hopper_block_starts_with_all_registers(kernels: list[dict[str, Any]]) -> None:
    """With fewer, its consumer warps would wait for ever for the registers that hopper.cuh gives
    them."""
    registers = {e["registers"] for e in kernels if e["kernel"] == "HopperAttention"}
    assert registers == {65536 // 384 // 8 * 8}


def test_shared_memory_suffices_on_every_gpu(kernels: list[dict[str, Any]]) -> None:
    for entry in kernels:
        is_hopper = entry["kernel"] == "HopperAttention"
        assert entry["shared_bytes"] <= (
            HOPPER_SHARED_BYTES if is_hopper else SMALLEST_SHARED_BYTES
        )
    assert min(entry["blocks"] for entry in kernels) >= 1


@pytest.mark.parametrize(
    ("op", "launches"), {"paged_attention": 2, "kv_cache_update": 1, "simple_add": 1}.items()
)
def test_launches(op: str, launches: int) -> None:
    (path,) = {CSRC / op / "cuda.cu", CSRC / op / "cuda/run.cu"} & set(CSRC.rglob("*.cu"))
    source = path.read_text()
    assert len(re.findall(r"\.Launch(?:Resident)?\(", source)) == launches


@pytest.mark.parametrize(
    "path",
    [path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".cc", ".h")],
    ids=lambda path: str(path.relative_to(CSRC)),
)
def test_the_host_neither_waits_nor_allocates_nor_copies(path: Any) -> None:
    calls = r"cuda\w*Synchronize|cudaMalloc|cudaFree|cudaMemcpy|cudaMemset|cudaEvent|cuMem"
    assert re.findall(calls, path.read_text()) == []


def test_objects_for_different_instruction_sets_share_no_symbols() -> None:
    """The linker may merge functions of the same name, and would then call one that this processor
    cannot run."""
    objects = list(ROOT.glob("build/*/CMakeFiles/cpu_*/**/cpu/kernel.cc.o"))
    if not objects:
        pytest.skip("no build folder with objects: pip install --editable leaves one")
    names = {re.findall(r"/cpu_(\w+)\.dir/", str(path))[0] for path in objects}
    assert names >= set(_native.cpu_instruction_sets())
    for path in objects:
        symbols = native.run("nm", path).stdout.splitlines()
        shared = [line for line in symbols if line.split()[-2] in ("W", "V", "u", "T")]
        assert shared == [], path
