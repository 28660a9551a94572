"""Describes the machine that a benchmark runs on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor's name from /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The version of each package; None if it is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu() -> dict[str, Any]:
    """The processor, its number of cores, and Python's version."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
