"""A short share of the calls from many threads, forks, interrupts, exits and imports."""

from __future__ import annotations

import pytest

from tests.reliability import stress
from tests.support import selection


@pytest.mark.parametrize("scenario", stress.SCENARIOS)
def test_scenario(scenario: str) -> None:
    assert stress.run_alone(scenario, seconds=2 if selection.everything else 1) > 0
