"""Builds shared_ffi._native for tests: with mutants, and for the emulated GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import mutants
from tools.emulated_gpu import build as emulated_gpu
from tools.emulated_gpu.build import run

ROOT = Path(__file__).parents[2]


def ffi_headers() -> Path:
    """The folder of the XLA FFI headers in the installed build."""
    folder = next(ROOT.glob("build/*/xla_ffi"), None)
    if folder is None:
        pytest.skip("no build folder with the XLA FFI headers: pip install --editable leaves one")
    return folder


def _cuda_compiler() -> list[str]:
    """The option that names the CUDA compiler of the installed build, unless that is the user's."""
    compiler = next(ROOT.glob("build/*/cuda/bin/nvcc"), None)
    return [] if compiler is None else [f"-DCUDA_WHEELS_DIR={compiler.parents[1]}"]


def configure(source: Path, build: Path, *options: str) -> None:
    """Configures a build of sources in a folder laid out as this repository."""
    pytest.importorskip("nanobind", reason="needed to build the kernels")
    outcome = run(
        "cmake",
        *("-S", source, "-B", build, "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DXLA_FFI_INCLUDE_DIR={ffi_headers()}",
        # What has no optimization of its own, such as nanobind, need not be fast.
        "-DCMAKE_CXX_FLAGS_RELEASE=-DNDEBUG",
        *_cuda_compiler(),
        *options,
    )
    assert outcome.returncode == 0, outcome.stdout


def build(folder: Path) -> Path:
    """Brings a configured build up to date. Returns the path of its module."""
    outcome = run("cmake", "--build", folder)
    assert outcome.returncode == 0, outcome.stdout
    (module,) = folder.glob("_native*.so")
    return module


def emulated(path: Path | str | None = None) -> Any:
    """The module whose CUDA kernels run on the emulated GPU: built, unless a path is given."""
    return load(path or emulated_build(), "emulated._native")


def emulated_build() -> Path:
    """The path of that module. The mutants are in it, none of them in effect: one build
    serves the tests of the kernels and the tests of these tests."""
    from filelock import FileLock  # noqa: PLC0415  (only tests need it)

    folder = ROOT / "build/emulated"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        mutants.write_sources(folder / "source")
        return for_emulated_gpu(
            folder / "build",
            # A share of the kernels. With --all, also those for Ampere and the other head sizes.
            "-DXLA_GPU_ARCHITECTURES=90a-real",
            "-DXLA_GPU_KERNELS=tested",
            f"-DXLA_GPU_CPU_INSTRUCTION_SETS={';'.join(mutants.instruction_sets())}",
            source=folder / "source",
            flags=f"-include {folder}/source/mutant.h -Wno-dangling-else",
        )


def for_emulated_gpu(folder: Path, *options: str, source: Path = ROOT, flags: str = "") -> Path:
    """The path of a module whose CUDA kernels are executed from the PTX that nvcc emits, by the
    emulated GPU (tools/emulated_gpu). `options`: of CMake."""
    from filelock import FileLock  # noqa: PLC0415  (only tests need it)

    compiler, machine = nvcc(), emulated_gpu.libraries()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        # The linker does not see that the machine has changed.
        for module in folder.glob("*.so"):
            if module.stat().st_mtime < (machine / "libemulated_gpu.a").stat().st_mtime:
                module.unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EMULATED_GPU_NVCC", str(compiler))
            configure(
                source,
                folder,
                f"-DCMAKE_CUDA_COMPILER={emulated_gpu.FOLDER / 'nvcc'}",
                f"-DCUDART_STATIC={machine / 'libemulated_gpu.a'}",
                "-DXLA_GPU_OPTIMIZE=-O0",
                # Names of its own: the installed library is loaded, too.
                "-DCMAKE_RELEASE_POSTFIX=_ptx",
                f"-DCMAKE_CXX_FLAGS=-DNB_DOMAIN=ptx {flags}",
                f"-DCMAKE_CUDA_FLAGS={flags.replace('-W', '-Xcompiler=-W')}",
                *options,
            )
            return build(folder)


def nvcc() -> Path:
    """The CUDA compiler. Skips the test if there is none."""
    if (found := emulated_gpu.nvcc()) is None:
        pytest.skip("no nvcc, which compiles the kernels to PTX")
    return found


def load(path: Path | str, name: str) -> Any:
    """Imports the module at a path. The last part of the name must be _native."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":  # make quick
    configure(ROOT, Path(sys.argv[1]), *sys.argv[2:])
    build(Path(sys.argv[1]))
