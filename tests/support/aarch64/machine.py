"""An Arm machine with this package, JAX and no hardware: Zig builds the package, Debian's Python and
the wheels of JAX are unpacked beside it, and qemu runs them. Nothing is installed on the machine
that does so. With CUDA, whose compiler does not read Zig's headers, Debian's GCC builds for Arm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import native

FOLDER = native.ROOT / "build/aarch64"
PYTHON = "python{}.{}".format(*sys.version_info)
PROJECT = tomllib.loads((native.ROOT / "pyproject.toml").read_text())
_ZIG = (sys.executable, "-m", "ziglang")
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of Python on the machine, which is made first if it is not there. The script
    finds the tests."""
    qemu, root = _qemu(), _root()
    jax = metadata.version("jax")
    site, packages = _package(), _wheels(f"jax-{jax}", f"jax=={jax}", "numpy", "packaging")
    return subprocess.run(
        [qemu, "-cpu", "max", "-L", root, root / "usr/bin" / PYTHON, "-c", script],
        cwd=FOLDER,
        env={
            "PYTHONPATH": f"{site}:{packages}:{native.ROOT}",
            "JAX_PLATFORMS": "cpu",
            "HOME": str(FOLDER),
        },
        capture_output=True,
        text=True,
    )


def build() -> Path:
    """Builds the package's library and module for the CPUs. Returns their folder."""
    compiler = [*_ZIG, "c++", "-target", "aarch64-linux-gnu.2.28"]
    tools = {"CXX_COMPILER": compiler, "AR": [*_ZIG, "ar"], "RANLIB": [*_ZIG, "ranlib"]}
    folder = _configure("native", tools, "-DXLA_GPU_CUDA=OFF")
    native.build(folder)
    return folder


def build_cuda(name: str, target: str, *options: str) -> Path:
    """Builds a target of Ninja with CUDA, in a folder of this name. Returns the folder. `options`: of
    CMake."""
    nvcc = native.nvcc()
    root = _debian("compiler", [], "g++-aarch64-linux-gnu")
    (requirement,) = (x for x in PROJECT["build-system"]["requires"] if "cuda-runtime" in x)
    wheels = _wheels("cuda-runtime", "--no-deps", requirement)
    (runtime,) = wheels.rglob("libcudart_static.a")
    # Its programs find their libraries there, and its linker those of Arm.
    libraries = f"LD_LIBRARY_PATH={root}/usr/lib/{os.uname().machine}-linux-gnu"
    compiler = f"{root}/usr/bin/aarch64-linux-gnu-g++"
    tools = {"CXX_COMPILER": ["env", libraries, compiler, f"--sysroot={root}"]}
    folder = _configure(
        name,
        tools,
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_HOST_COMPILER={FOLDER}/{name}/cxx_compiler",
        f"-DCMAKE_CUDA_FLAGS=-L{runtime.parent} -Xptxas=-O0",  # for results alone
        f"-DCUDART_STATIC={runtime}",
        "-DXLA_GPU_OPTIMIZE=-O0",
        *options,
    )
    outcome = native.run("cmake", "--build", folder, "--target", target)
    assert outcome.returncode == 0, outcome.stdout
    return folder


def _configure(name: str, tools: dict[str, list[str]], *options: str) -> Path:
    """Configures a build with tools for Arm. Returns its folder."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for tool, command in tools.items():
        program = folder / tool.lower()
        program.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
        program.chmod(0o755)
        options = (*options, f"-DCMAKE_{tool}={program}")
    native.configure(
        native.ROOT,
        folder,
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
        *options,
    )
    return folder


def _package() -> Path:
    """The folder of the package as it is installed."""
    built, site = build(), FOLDER / "site"
    shutil.rmtree(site, ignore_errors=True)
    for name in PROJECT["tool"]["scikit-build"]["wheel"]["packages"]:
        ignored = shutil.ignore_patterns("csrc", "__pycache__", "*.so")
        shutil.copytree(native.ROOT / name, site / name, ignore=ignored)
    (module,) = built.glob("_native*.so")
    of_arm = module.name.replace(os.uname().machine, "aarch64")
    shutil.copy(module, site / "shared_ffi" / of_arm)
    shutil.copy(built / "libxla_paged_attention.so", site / "shared_ffi")
    version = PROJECT["project"]["version"]
    information = site / f"xla_paged_attention-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: xla-paged-attention\nVersion: {version}\n")
    return site


def _wheels(name: str, *packages: str) -> Path:
    """A folder with packages for Arm, some of which may be options of pip."""
    folder = FOLDER / f"{name}-{PYTHON}"
    if not folder.exists():
        platforms = [f"--platform={platform}" for platform in _PLATFORMS]
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        _run(
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"),
            *("--target", unfinished, "--only-binary=:all:", *platforms, *packages),
        )
        unfinished.rename(folder)
    return folder


def _qemu() -> Path:
    """The emulator: the machine's, or that of Debian's package."""
    names = ("qemu-aarch64-static", "qemu-aarch64")
    if found := next(filter(None, map(shutil.which, names)), None):
        return Path(found)
    return _debian("qemu", [], "qemu-user-static") / "usr/bin" / names[0]


def _root() -> Path:
    """Debian's Python for Arm and the libraries that it and the wheels need."""
    root = _debian("root", ["-o", "APT::Architecture=arm64"], "python3", "libstdc++6")
    if not (root / "usr/bin" / PYTHON).exists():
        pytest.skip(f"Debian here has no {PYTHON} for Arm, which the build is for")
    return root


def _debian(name: str, options: list[str], *packages: str) -> Path:
    """Downloads packages with all that they depend on, and unpacks them into a folder."""
    folder = FOLDER / name
    if not folder.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            pytest.skip(f"no apt-get and dpkg-deb, which would bring {', '.join(packages)}")
        apt = FOLDER / f"{name}.apt"
        for part in ("lists/partial", "archives/partial"):
            (apt / part).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()  # nothing is there yet
        options = [*options, "-o", f"Dir::State={apt}", "-o", f"Dir::Cache={apt}"]
        options += ["-o", f"Dir::State::status={apt}/status"]
        _run("apt-get", *options, "update")
        download = ("install", "--download-only", "--yes", "--no-install-recommends")
        _run("apt-get", *options, *download, *packages)
        unfinished = FOLDER / f"{name}.unfinished"
        for package in (apt / "archives").glob("*.deb"):
            _run("dpkg-deb", "-x", package, unfinished)
        unfinished.rename(folder)
        shutil.rmtree(apt)
    return folder


def _run(*command: object) -> None:
    outcome = native.run(*command)
    if outcome.returncode:
        what = " ".join(map(str, command[:4]))
        pytest.skip(f"{what} failed: {outcome.stdout.strip().splitlines()[-1:]}")
