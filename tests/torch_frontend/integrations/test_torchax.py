"""Runs torchax_cases.py: the import of torchax adds a device to PyTorch for the whole process."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("torchax") is None, reason="pip install torchax")
def test_torchax() -> None:
    cases = Path(__file__).with_name("torchax_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
