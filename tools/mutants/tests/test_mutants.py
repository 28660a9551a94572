"""A program with two mutants, and tests that catch one of them."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.mutants.mutants import Mutant, find, load, plant, write
from tools.mutants.runner import NO_MUTANT, MutantRunner

SOURCE = """
// The sum of the numbers below n.
extern "C" int Sum(int n) {
  int sum = 0;
  for (int i = 0; i < n; ++i) sum += i;
  return sum;
}
"""
MUTANTS = """
[leaves-out-the-last]
quote = "«i < n»"
wrong = "i < n - 1"

[crashes]
quote = "«return sum;»"
wrong = "if (n == 3) __builtin_trap(); return sum;"

[sum-of-none]
quote = "int sum = «0»"
wrong = "n == 99"
"""
TESTS = """
import ctypes
import pytest

library = ctypes.CDLL({module!r})

@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_sum(n):
    assert library.Sum(n) == sum(range(n))

def test_three():
    assert library.Sum(3) == 3
"""


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> list[Mutant]:
    path = tmp_path_factory.mktemp("mutants") / "sum.toml"
    path.write_text(MUTANTS)
    return load(path)


@pytest.fixture(scope="module")
def runner(
    mutants: list[Mutant], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MutantRunner]:
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("sum")
    write(plant({Path("sum.cc"): SOURCE}, mutants, Path()), folder)
    module, tests = folder / "sum.so", folder / "test_sum.py"
    command = [compiler, "-shared", "-fPIC", "-include", "mutant.h", "sum.cc", "-o", str(module)]
    subprocess.run(command, check=True, cwd=folder)
    tests.write_text(textwrap.dedent(TESTS.format(module=str(module))))
    options = f"-p no:cacheprovider --rootdir={folder} --import-mode=importlib"
    runner = MutantRunner(module, tests, options, folder / "log")
    yield runner
    runner.close()


def test_the_first_failure(runner: MutantRunner) -> None:
    assert runner.first_failure(NO_MUTANT) == "all passed"
    assert runner.first_failure(0) == "test_sum[2]"
    assert runner.first_failure(0, first="test_three") == "test_three"
    assert runner.first_failure(0, matching="three") == "test_three"
    assert runner.first_failure(0, matching="four") == "no tests"
    assert runner.first_failure(0, first="test_four") == "no test is called test_four"
    assert runner.passes("test_sum[2]")


def test_a_mutant_that_ends_the_process_or_is_not_caught(runner: MutantRunner) -> None:
    """A signal ends the fork alone."""
    assert runner.first_failure(1).startswith("the tests ended with status ")
    assert runner.first_failure(2) == "all passed"
    assert runner.first_failure(0) == "test_sum[2]"


def test_a_quote_is_there_once(mutants: list[Mutant]) -> None:
    path, quote = find(mutants[0], {Path("a/sum.cc"): SOURCE, Path("sum.md"): SOURCE}, Path())
    assert (path, quote["right"]) == (Path("a/sum.cc"), "i < n")
    twice = {Path("a/sum.cc"): SOURCE, Path("b/sum.cc"): SOURCE}
    with pytest.raises(AssertionError, match=r"it is there 2 times \(sum.cc, sum.cc\)"):
        find(mutants[0], twice, Path())
    assert plant(twice, mutants, Path(), leaves_out=True) == twice
    assert plant(twice, mutants, Path("a"), leaves_out=True) != twice


def test_mutants_may_touch() -> None:
    inner = Mutant("inner", "a = b + «c»;", "d")
    outer = Mutant("outer", "«a = b + c;»", "a = 0;")
    (text,) = plant({Path("x.cc"): "a = b + c;"}, [outer, inner], Path()).values()
    assert text == (
        "if (mutant_in_effect == 0) { a = 0; } else { a = b + "
        "(mutant_in_effect == 1 ? (d) : (c)); }"
    )


def test_files_that_are_right_keep_their_time(tmp_path: Path) -> None:
    write({Path("a/x.cc"): "1", Path("y.cc"): "2"}, tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    write({Path("a/x.cc"): "1"}, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == {
        path: time for path, time in times.items() if path.name != "y.cc"
    }
