"""Runs the tests of one file on each mutant of one build: `python -m tools.mutants.runner`.

Python, the libraries, the collected tests and the build are loaded once. Every request runs in a
fork, so a mutant that crashes the process or corrupts its memory does not reach the next one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest

SECONDS = 600  # time limit of a request: a mutant can make a kernel loop for ever
NO_MUTANT = -1


class MutantRunner:
    """Starts the process that runs the tests of a file, and sends it requests."""

    def __init__(self, module: Path, tests: Path | str, options: str, log: Path) -> None:
        """`options`: of pytest, in which {} stands for the path of the module."""
        self.log = log
        self._passes: dict[str, bool] = {}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module, tests, options.format(module)],
                cwd=Path(__file__).parents[2],
                # NumPy's threads are not safe to fork.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def first_failure(self, mutant: int, matching: str = "", first: str | None = None) -> str:
        """The name of the first test that fails with a mutant, or why there is none. Only tests
        whose names contain `matching` are run, and `first` before all others."""
        return self._ask(mutant=mutant, matching=matching, first=first)

    def passes(self, test: str) -> bool:
        """Whether a test passes without a mutant. Each is run once."""
        if test not in self._passes:
            self._passes[test] = self._ask(mutant=NO_MUTANT, only=test) == "all passed"
        return self._passes[test]

    def close(self) -> None:
        self._process.communicate(timeout=SECONDS)

    def _ask(self, **request: Any) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, self.log.read_text()
        return answer


class Loop:
    """A pytest plugin that replaces the loop over the tests by a loop over requests."""

    def __init__(self, module: str, requests: TextIO, answers: TextIO) -> None:
        self._mutant = ctypes.c_int.in_dll(ctypes.CDLL(module), "mutant_in_effect")
        self._requests = requests
        self._answers = answers
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for line in self._requests:
            self._answers.write(self._in_a_fork(session.items, **json.loads(line)) + "\n")
            self._answers.flush()
        return True

    def _in_a_fork(self, items: list[pytest.Item], **request: Any) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            try:
                os.write(writing, self._answer(items, **request).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        return answer or f"the tests ended with status {status}"

    def _answer(
        self,
        items: list[pytest.Item],
        mutant: int,
        only: str | None = None,
        matching: str = "",
        first: str | None = None,
    ) -> str:
        self._mutant.value = mutant
        chosen = [item for item in items if matching in item.name and only in (None, item.name)]
        chosen.sort(key=lambda item: item.name != first)
        if first is not None and first not in [item.name for item in chosen]:
            return f"no test is called {first}"
        if not chosen:
            return "no tests"
        for item, next_item in zip(chosen, [*chosen[1:], None], strict=True):
            self._reports.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            failed = {report.when for report in self._reports if report.failed}
            if failed == {"call"}:
                return item.name
            if failed:
                return f"an error in the setup or teardown of {item.name}"
        return "all passed"


def main(module: str, tests: str, options: str) -> int:
    """The process that runs the tests."""
    answers = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0))
    os.dup2(2, 1)  # what pytest prints
    return pytest.main(
        ["-q", *options.split(), tests],
        plugins=[Loop(module, requests, answers)],
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
