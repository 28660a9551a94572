"""What a benchmark ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor's name, as the kernel tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of each package; None of those that are not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu() -> dict[str, Any]:
    """The processor, its cores, Python."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
