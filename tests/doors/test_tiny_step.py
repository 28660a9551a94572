"""Every door that needs no GPU works, says ``python -m shared_ffi``."""

from __future__ import annotations

import pytest

from shared_ffi import _doors

DOORS = [door for door in _doors.DOORS if door.platform == "cpu"]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_the_tiny_step(door: _doors.Door) -> None:
    outcome = _doors.try_door(door, 180)
    assert outcome.status == _doors.WORKS, outcome
