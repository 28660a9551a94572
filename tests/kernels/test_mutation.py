"""The tests of the kernels must fail when a kernel is wrong. One build of the sources has all mutants,
and the tests of a suite run on each of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from shared_ffi import OPS
from tests.support import mutants, native
from tools.mutants.mutants import find, plant
from tools.mutants.runner import MutantRunner


class Suite(NamedTuple):
    tests: str
    option: str


SUITES = {
    "cpu": Suite("tests/kernels/test_cpu_kernel.py", "--native"),
    "cuda": Suite("tests/kernels/test_cuda_kernel.py", "--emulated"),
    "one_order": Suite("tests/kernels/test_one_order.py", "--emulated"),
    "varlen_cpu": Suite("tests/kernels/test_varlen_kernel.py", "--native"),
    "varlen_cuda": Suite("tests/kernels/test_varlen_cuda_kernel.py", "--emulated"),
}
OTHER_OPS = {op.OP for op in OPS} - {"paged_attention"}


def test_the_mutants_fit_the_sources() -> None:
    """Finds a quote that is out of date without waiting for a build."""
    plant(mutants.read_sources(), mutants.ALL, mutants.CSRC)


@pytest.fixture(scope="session")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], MutantRunner]]:
    """The process of each suite, started when it is first needed."""
    folder = tmp_path_factory.mktemp("mutants")

    started: dict[str, MutantRunner] = {}

    def runner(name: str) -> MutantRunner:
        if name not in started:
            tests, option = SUITES[name]
            options = f"-n0 --shuffle {option}={{}}"
            started[name] = MutantRunner(native.emulated_build(), tests, options, folder / name)
        return started[name]

    yield runner
    for process in started.values():
        process.close()


# With --all every mutant, and else every fourth: a mutant that survives tells of a test that has changed
# with it, so most changes need none of them.
MUTANTS = [
    pytest.param(name, mutant.name, marks=[pytest.mark.nightly] * (number % 4 > 0))
    for name in SUITES
    for number, mutant in enumerate(mutants.SUITES[name])
]


@pytest.mark.parametrize(("name", "mutant"), MUTANTS)
def test_a_mutant_fails_the_suite(
    name: str, mutant: str, runners: Callable[[str], MutantRunner]
) -> None:
    """One test fails with the mutant, and passes without it."""
    planted = next(x for x in mutants.SUITES[name] if x.name == mutant)
    # A test of the op itself must catch a mutant in an op's folder.
    path, _ = find(planted, mutants.read_sources(), mutants.CSRC)
    folder = path.relative_to(mutants.CSRC).parts[0]
    matching = folder if folder in OTHER_OPS else ""
    runner = runners(name)
    failed = runner.first_failure(mutants.ALL.index(planted), matching, planted.caught_by)
    assert failed.startswith("test_"), f"{failed}\n{runner.log.read_text()}"
    assert runner.passes(failed), f"{failed} fails without the mutant\n{runner.log.read_text()}"
