"""The suite must fail when a kernel is wrong: all faults are planted in one build of the sources, where
an environment variable chooses the one that counts, and the tests are run on each."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from shared_ffi import _native
from tests.support import faults, native

CSRC = native.ROOT / "shared_ffi/csrc"

# A fault is chosen when the module is loaded.
CHOICE = "XLA_GPU_PLANTED_FAULT"
HEADER = f"""#pragma once
#include <cstdlib>
#include <string>
inline const int planted_fault = [] {{
  const char* number = std::getenv("{CHOICE}");
  return number == nullptr ? -1 : std::stoi(number);
}}();
"""


@dataclass
class Suite:
    name: str
    tests: str
    option: str
    cuda: str
    instruction_sets: Sequence[str] = ("baseline",)

    @functools.cached_property
    def faults(self) -> list[faults.PlantedFault]:
        return faults.load(CSRC, self.name)


# The one with units of its own, where the machine has it, and the one that every machine has.
SETS = [name for name in _native.cpu_instruction_sets() if name in ("avx512_bf16", "baseline")]

SUITES = {
    "cpu": Suite(
        "cpu", "tests/kernels/test_kernel.py", "--native", cuda="OFF", instruction_sets=SETS
    ),
    "cuda": Suite("cuda", "tests/kernels/test_cuda_kernel.py", "--emulated", cuda="EMULATED"),
}


def plant(suite: Suite, folder: Path) -> None:
    """Makes a folder laid out as this repository whose sources have all faults of a suite. What is
    there already stays as old as it is."""
    paths = [native.ROOT / "CMakeLists.txt"]
    for part in ("shared_ffi/csrc", "cmake"):
        paths += [path for path in (native.ROOT / part).rglob("*.*") if path.suffix != ".pyc"]
    planted = faults.plant({path: path.read_text() for path in paths}, suite.faults)
    sources = {folder / path.relative_to(native.ROOT): text for path, text in planted.items()}
    sources[folder / "planted_fault.h"] = HEADER
    for path, text in sources.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for path in folder.rglob("*"):
        if path.is_file() and path not in sources:
            path.unlink()


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_the_faults_fit_the_sources(suite: Suite, tmp_path: Path) -> None:
    """At once, and not after the builds below."""
    plant(suite, tmp_path)


@functools.cache
def build(name: str) -> Path:
    """The module of a suite's sources with its faults."""
    suite, folder = SUITES[name], native.ROOT / "build/planted" / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        plant(suite, folder / "source")
        native.configure(
            folder / "source",
            folder / "build",
            f"-DCMAKE_CXX_FLAGS=-include {folder}/source/planted_fault.h -Wno-dangling-else",
            # Enough for every case, and fewer to build. At 128 the kernel for Hopper has more than one
            # block of columns.
            "-DXLA_GPU_HEAD_SIZES=128;256",
            "-DXLA_GPU_HEAD_SIZES_OF_8_BITS=64",
            f"-DXLA_GPU_CPU_INSTRUCTION_SETS={';'.join(suite.instruction_sets)}",
            f"-DXLA_GPU_CUDA={suite.cuda}",
        )
        return native.build(folder / "build")


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, fault.name) for name, suite in SUITES.items() for fault in suite.faults],
)
def test_a_fault_fails_the_suite(name: str, fault: str, tmp_path: Path) -> None:
    """One test fails with the fault, and passes without it."""
    suite = SUITES[name]
    # Few tests can fail of those of a simple op, which would be met late among all others.
    number, chosen_fault = next(
        (i, planted) for i, planted in enumerate(suite.faults) if planted.name == fault
    )
    op = next(iter(chosen_fault.table.parent.relative_to(CSRC).parts), "paged_attention")
    chosen = () if op == "paged_attention" else ("-k", op)

    def run(number: int, *options: str) -> subprocess.CompletedProcess[str]:
        return native.run(
            *(sys.executable, "-m", "pytest", "-q", "-n0", "--shuffle", *chosen, *options),
            *(native.ROOT / suite.tests, suite.option, build(name), "--rootdir", native.ROOT),
            *("-c", native.ROOT / "pyproject.toml", "-o", f"cache_dir={tmp_path}"),
            environment={CHOICE: str(number)},
        )

    with_fault = run(number, "--exitfirst")
    assert with_fault.returncode == 1, with_fault.stdout
    assert "1 failed" in with_fault.stdout.strip().splitlines()[-1], with_fault.stdout
    without = run(-1, "--last-failed", "--last-failed-no-failures=none")
    assert without.returncode == 0, without.stdout
