"""The tests of the kernels must fail when a kernel is wrong. One build of the sources has all faults,
and the tests of a suite run on each of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from shared_ffi import OPS
from tests.support import faults, native
from tests.support.fault_runner import FaultRunner


class Suite(NamedTuple):
    tests: str
    option: str


SUITES = {
    "cpu": Suite("tests/kernels/test_cpu_kernel.py", "--native"),
    "cuda": Suite("tests/kernels/test_cuda_kernel.py", "--emulated"),
}
OTHER_OPS = {op.OP for op in OPS} - {"paged_attention"}


def test_the_faults_fit_the_sources() -> None:
    """Finds a quote that is out of date without waiting for a build."""
    faults.plant(faults.read_sources(), faults.ALL)


@pytest.fixture(scope="session")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], FaultRunner]]:
    """The process of each suite, started when it is first needed."""
    folder = tmp_path_factory.mktemp("faults")

    started: dict[str, FaultRunner] = {}

    def runner(name: str) -> FaultRunner:
        if name not in started:
            started[name] = FaultRunner(native.emulated_build(), *SUITES[name], folder / name)
        return started[name]

    yield runner
    for process in started.values():
        process.close()


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault.name) for name in SUITES for fault in faults.SUITES[name]]
)
def test_a_fault_fails_the_suite(
    name: str, fault: str, runners: Callable[[str], FaultRunner]
) -> None:
    """One test fails with the fault, and passes without it."""
    planted = next(x for x in faults.SUITES[name] if x.name == fault)
    # A test of the op itself must catch a fault in an op's folder.
    path, _ = faults.find(planted, faults.read_sources())
    folder = path.relative_to(faults.CSRC).parts[0]
    matching = folder if folder in OTHER_OPS else ""
    runner = runners(name)
    failed = runner.first_failure(faults.ALL.index(planted), matching, planted.caught_by)
    assert failed.startswith("test_"), f"{failed}\n{runner.log.read_text()}"
    assert runner.passes(failed), f"{failed} fails without the fault\n{runner.log.read_text()}"
