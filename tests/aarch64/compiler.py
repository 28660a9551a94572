"""Cross-compiles programs for AArch64. Zig contains Clang and the C and C++ libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import native

COMPILER = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static"]
FLAGS = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
INCLUDED = [native.ROOT / "shared_ffi/csrc", native.ROOT / "tests/aarch64"]


def compile_program(folder: Path, sources: Iterable[Path], *options: object) -> Path:
    """Compiles sources in a folder and returns the path of the program."""

    def compiled(source: Path) -> Path:
        to = folder / f"{source.parent.name}-{source.stem}.o"
        paths = [f"-I{path}" for path in INCLUDED]
        _run(*COMPILER, *FLAGS, *paths, *options, "-c", source, "-o", to)
        return to

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compiled, sources))
    program = folder / "program"
    _run(*COMPILER, *objects, "-o", program)
    return program


def _run(*command: object) -> None:
    outcome = native.run(*command)
    assert outcome.returncode == 0, outcome.stdout
