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


def last_cache_bytes() -> int:
    """The size of the processor's largest cache; 0 if Linux does not say."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    units = {"K": 2**10, "M": 2**20}
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=0)


def cpu() -> dict[str, Any]:
    """The processor, its number of cores, and Python's version."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
