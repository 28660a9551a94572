"""Builds the emulated GPU, and programs for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent


def run(
    *command: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command. Programs beside this interpreter are on its PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(word) for word in command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PATH": path} | (environment or {}),
    )


def nvcc() -> Path | None:
    """The CUDA compiler: that of a build in this repository, or the user's. None: there is none."""
    if found := next(ROOT.glob("build/*/cuda/bin/nvcc"), None):
        return found
    name = os.environ.get("CUDACXX") or shutil.which("nvcc")
    return Path(name) if name else None


def libraries(folder: Path = ROOT / "build/emulated/gpu") -> Path:
    """The folder with the two libraries, brought up to date: libemulated_gpu.a takes the place of
    the static CUDA runtime, libemulated_gpu_ptx.so runs texts in PTX."""
    from filelock import FileLock  # noqa: PLC0415  (only tests need it)

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        for command in (
            ("cmake", "-S", FOLDER, "-B", folder, "-G", "Ninja"),
            ("cmake", "--build", folder),
        ):
            outcome = run(*command)
            assert outcome.returncode == 0, outcome.stdout
    return folder


def compile_library(compiler: Path, source: Path, target: Path, architecture: str) -> None:
    """Compiles a .cu file, with the emulated GPU in it, to a shared library.

    Args:
        compiler: nvcc.
        architecture: of the GPU, such as 90a.
    """
    outcome = run(
        *("bash", FOLDER / "nvcc", "-std=c++17", "-shared"),
        *("-gencode", f"arch=compute_{architecture},code=[sm_{architecture}]"),
        *("-Xcompiler=-fPIC", "-cudart", "none", source, "-o", target),
        libraries() / "libemulated_gpu.a",
        environment={"EMULATED_GPU_NVCC": str(compiler)},
    )
    assert outcome.returncode == 0, outcome.stdout
