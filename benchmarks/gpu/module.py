"""Chooses the library's module before anything else of this repository is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def use(path: Path) -> None:
    """Lets this process import a build's module in place of the installed one."""
    assert "shared_ffi._native" not in sys.modules, "the installed module is in use already"
    spec = spec_from_file_location("shared_ffi._native", path)
    assert spec is not None and spec.loader is not None
    native = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(native)


def begin(path: Path | None, environment: Mapping[str, str]) -> None:
    """How a process with contestants begins."""
    os.environ.update(environment)
    if path is not None:
        use(path)
