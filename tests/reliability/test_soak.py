"""A short share of the soak, in which a request that comes again gets the same bits, and of the stress
scenarios: many threads, forks, interrupts, exits and imports."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.reliability import soak, stress
from tests.support import selection

MOST_KIB = 500  # per 1000 steps: a leak of half a KiB a step. Hours show smaller ones.


def test_a_short_soak() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", soak.MODULE, "--passes", "6"],
        cwd=soak.ROOT,
        text=True,
        capture_output=True,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    slopes = re.findall(r"([-+][\d.]+) KiB per 1000 steps", outcome.stdout)
    assert len(slopes) == 3 and max(map(float, slopes)) < MOST_KIB, outcome.stdout
    assert outcome.stdout.count("the same bits 6 times") == 3
    assert int(re.findall(r"(\d+) preemptions", outcome.stdout)[0]) > 0


def test_bits_that_drift_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "REQUESTS_PER_PASS", 3)
    soaked = soak.Soak("torch")
    run, count = soaked._runner.run, 0

    def drifting(operands: Any) -> np.ndarray:
        nonlocal count
        count += 1
        result = run(operands)
        if count == 60:
            result = result.copy()
            result[0, 0, 0] += np.float32(1e-6)
        return result

    monkeypatch.setattr(soaked._runner, "run", drifting)
    with pytest.raises(AssertionError, match="the same request has other bits"):
        monkeypatch.setattr(soak, "arrivals", lambda path: iter(()))
        soaked._arrivals = iter(())
        soaked.run(passes=20)


@pytest.mark.parametrize("jump", [0, 2000])
def test_slope_of_memory(jump: int) -> None:
    """It shows what grows in each pass, and not what is taken once."""
    memory = [(1000 * i, 10.0 + 3 * max(i, 5) + jump * (i > 12)) for i in range(20)]
    assert abs(soak.Report("torch", memory=memory).slope - 3) < 1e-9


@pytest.mark.parametrize("scenario", stress.SCENARIOS)
def test_stress(scenario: str) -> None:
    assert stress.run_alone(scenario, seconds=2 if selection.everything else 1) > 0
