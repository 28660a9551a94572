"""Runs torchax_cases.py: the import of torchax adds a device to PyTorch for the whole process."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest


def test_torchax() -> None:
    try:  # not find_spec: torch_xla brings a folder with an older torchax
        metadata.version("torchax")
    except metadata.PackageNotFoundError:
        pytest.skip("pip install 'xla-paged-attention[torchax]'")
    cases = Path(__file__).with_name("torchax_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", str(cases)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
