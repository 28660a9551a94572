"""The suite must fail when a kernel is wrong: each fault is planted, built, and tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

nanobind = pytest.importorskip("nanobind", reason="needed to build the faulty kernels")

ROOT = Path(__file__).parents[1]
ATTENTION, UPDATE = "paged_attention/cpu.cc", "kv_cache_update/cpu.cc"

FAULTS = {
    "none": (ATTENTION, "", ""),
    "ignores-the-block-table": (
        ATTENTION,
        "const int64_t block = table[position / p_.block_size];",
        "const int64_t block = table[0] * 0 + position / p_.block_size % p_.num_blocks;",
    ),
    "drops-the-last-block": (
        ATTENTION,
        "const int64_t end = run_.position + run_.num_tokens;",
        "const int64_t end = (run_.position + run_.num_tokens - 1) / p_.block_size * p_.block_size;",
    ),
    "window-one-too-long": (
        "paged_attention/params.h",
        "position - sliding_window + 1)",
        "position - sliding_window)",
    ),
    "window-one-too-short": (
        "paged_attention/params.h",
        "position - sliding_window + 1)",
        "std::min(position, position - sliding_window + 2))",
    ),
    "sees-the-next-token": (ATTENTION, "std::min(position + 1, end)", "std::min(position + 2, end)"),
    "mixes-up-query-heads": (
        ATTENTION,
        "kv_head * group_ + row % group_;",
        "row % group_ * p_.num_kv_heads + kv_head;",
    ),
    "forgets-to-rescale": (ATTENTION, "sums[i] *= shrink;", "sums[i] *= shrink < 0 ? 0.0f : 1.0f;"),
    "forgets-the-soft-cap": (ATTENTION, "if (p_.soft_cap > 0) {", "if (p_.soft_cap > 1e30f) {"),
    "leaves-padding-rows": (
        ATTENTION,
        "std::fill(output + end * row_bytes, output + p.num_tokens * row_bytes, 0);",
        "(void)end;",
    ),
    "multiplies-unattended-values-by-zero": (
        ATTENTION,
        "Accumulate(logits, scratch_.v.data(), row_begin, row_end,",
        "Accumulate(logits, scratch_.v.data(), 0, kTile,",
    ),
    "swaps-key-and-value": (UPDATE, "std::memcpy(target, static_cast<const char*>(p.key)", "std::memcpy(target, static_cast<const char*>(p.value)"),
    "writes-padding": (
        UPDATE,
        "const int64_t slot = p.Slot(token);",
        "const int64_t slot = p.Slot(token) < 0 ? 0 : p.Slot(token);",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources beside a configured build of them."""
    headers = next(ROOT.glob("build/*/xla_ffi"), None)
    if headers is None:
        pytest.skip("no build folder with the XLA FFI headers: pip install --editable leaves one")
    folder = tmp_path_factory.mktemp("mutation")
    shutil.copytree(ROOT / "shared_ffi/csrc", folder / "source/shared_ffi/csrc")
    shutil.copy(ROOT / "CMakeLists.txt", folder / "source")
    run(
        "cmake",
        *("-S", folder / "source", "-B", folder / "build", "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        f"-DXLA_FFI_INCLUDE_DIR={headers}",
        "-DCMAKE_CXX_FLAGS=-fno-strict-aliasing",
    )
    return folder


def run(*command: object) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [str(word) for word in command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PATH": path},
    )
    if result.returncode not in (0, 1):
        pytest.fail(f"{command} gave {result.returncode}:\n{result.stdout}")
    return result


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_the_suite(fault: str, build: Path) -> None:
    name, right, wrong = FAULTS[fault]
    source = build / "source/shared_ffi/csrc" / name
    sound = source.read_text()
    assert fault == "none" or sound.count(right) == 1, "the fault no longer fits the source"
    try:
        source.write_text(sound.replace(right, wrong) if right else sound)
        compiled = run("cmake", "--build", build / "build")
        assert compiled.returncode == 0, compiled.stdout
        (module,) = (build / "build").glob("_native*.so")
        tested = run(
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0"),
            *(ROOT / "tests/test_kernel.py", "--native", module, "--rootdir", ROOT),
            *("-c", ROOT / "pyproject.toml"),
        )
    finally:
        source.write_text(sound)
    verdict = tested.stdout.strip().splitlines()[-1]
    if fault == "none":
        assert tested.returncode == 0, tested.stdout
    else:
        assert tested.returncode == 1, tested.stdout
        assert "1 failed" in verdict, tested.stdout
