"""The tests of the kernels must fail when a kernel is wrong. All faults of a suite are planted in one
build of the sources, and its tests run on each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from shared_ffi import OPS, _native
from tests.support import faults, native
from tests.support.fault_runner import FaultRunner

# The libraries of a build share one variable, which FaultRunner sets.
HEADER = """#pragma once
__attribute__((visibility("default"))) inline int planted_fault = -1;
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
        return faults.load(self.name)


# One set with instructions of its own, if the processor has it, and the one of every processor.
SETS = [name for name in _native.cpu_instruction_sets() if name in ("avx512_bf16", "baseline")]

OTHER_OPS = {op.OP for op in OPS} - {"paged_attention"}

SUITES = {
    "cpu": Suite(
        "cpu", "tests/kernels/test_cpu_kernel.py", "--native", cuda="OFF", instruction_sets=SETS
    ),
    "cuda": Suite("cuda", "tests/kernels/test_cuda_kernel.py", "--emulated", cuda="EMULATED"),
}


def read_sources() -> dict[Path, str]:
    """The files that a build needs."""
    paths = [native.ROOT / "CMakeLists.txt"]
    for part in ("shared_ffi/csrc", "cmake"):
        paths += [path for path in (native.ROOT / part).rglob("*.*") if path.suffix != ".pyc"]
    return {path: path.read_text() for path in paths}


def plant(suite: Suite, folder: Path) -> None:
    """Writes the sources with all faults of a suite to a folder laid out as this repository. Files
    that are right already keep their time, so that a build compiles only what changed."""
    planted = faults.plant(read_sources(), suite.faults)
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
    """Finds a quote that is out of date without waiting for a build."""
    plant(suite, tmp_path)


@functools.cache
def build(name: str) -> Path:
    """Builds a suite's sources with its faults. Returns the path of the module."""
    suite, folder = SUITES[name], native.ROOT / "build/planted" / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        plant(suite, folder / "source")
        native.configure(
            folder / "source",
            folder / "build",
            f"-DCMAKE_CXX_FLAGS=-include {folder}/source/planted_fault.h -Wno-dangling-else",
            # These head sizes suffice for every case and build faster. At 128 the Hopper kernel has
            # more than one block of columns.
            "-DXLA_GPU_HEAD_SIZES=128;256",
            "-DXLA_GPU_HEAD_SIZES_OF_8_BITS=128",
            "-DXLA_GPU_OPTIMIZE=-O0",
            f"-DXLA_GPU_CPU_INSTRUCTION_SETS={';'.join(suite.instruction_sets)}",
            f"-DXLA_GPU_CUDA={suite.cuda}",
        )
        return native.build(folder / "build")


@pytest.fixture(scope="session")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], FaultRunner]]:
    """The process of each suite, started when it is first needed."""
    folder = tmp_path_factory.mktemp("faults")

    started: dict[str, FaultRunner] = {}

    def runner(name: str) -> FaultRunner:
        if name not in started:
            suite = SUITES[name]
            started[name] = FaultRunner(build(name), suite.tests, suite.option, folder / name)
        return started[name]

    yield runner
    for process in started.values():
        process.close()


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, fault.name) for name, suite in SUITES.items() for fault in suite.faults],
)
def test_a_fault_fails_the_suite(
    name: str, fault: str, runners: Callable[[str], FaultRunner]
) -> None:
    """One test fails with the fault, and passes without it."""
    number, planted = next((i, x) for i, x in enumerate(SUITES[name].faults) if x.name == fault)
    # A test of the op itself must catch a fault in an op's folder.
    path, _ = faults.find(planted, read_sources())
    folder = path.relative_to(faults.CSRC).parts[0]
    matching = folder if folder in OTHER_OPS else ""
    runner = runners(name)
    failed = runner.first_failure(number, matching, planted.caught_by)
    assert failed.startswith("test_"), f"{failed}\n{runner.log.read_text()}"
    assert runner.passes(failed), f"{failed} fails without the fault\n{runner.log.read_text()}"
