"""``make wheels``: a source distribution and, from it alone, a wheel for each Python.

Nothing is taken from the working tree but what the source distribution holds. The wheels are built
without a network, from build requirements that were fetched before. Each is checked, then installed
into an empty environment, where ``python -m shared_ffi`` tries its backends.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
OUT = ROOT / "build/dist"

BACKENDS = ["jax-cpu", "torch-cpu", "inductor-cpu", "aot-inductor-cpu", "torch-xla-cpu", "openxla-cpu"]

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Hides the sources, in whose folder the commands run."""

# Frameworks that are not there are named, with what to install.
WITHOUT_FRAMEWORKS = """
import shared_ffi
for frontend in ("jax_frontend", "torch_frontend"):
    try:
        __import__(frontend)
    except ImportError as error:
        assert "pip install 'xla-paged-attention[" in str(error), error
    else:
        raise SystemExit(f"{frontend} can be imported: a framework is installed")
print(shared_ffi.library_path())
"""


def run(*command: object, environment: dict[str, str] | None = None) -> None:
    """Runs a command, which must succeed."""
    print("+", *command, flush=True)
    # build and auditwheel call tools that are installed beside them.
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [*map(str, command)],
        check=True,
        cwd=ROOT,
        env=os.environ | {"PATH": path} | (environment or {}),
    )


def is_interpreter(python: str) -> bool:
    """Returns whether a command runs Python. Tools that manage versions leave some that do not."""
    command = [python, "-c", "print(1)"]
    return bool(shutil.which(python)) and subprocess.run(command, capture_output=True).stdout != b""


def build_sdist(out: Path) -> Path:
    """Makes the source distribution."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out)
    (sdist,) = out.glob("*.tar.gz")
    return sdist


def fetch_requirements(python: str, folder: Path) -> None:
    """Downloads what a build needs, for one Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [*project["build-system"]["requires"], "cmake>=3.22", "ninja>=1.11"]
    run(python, "-m", "pip", "download", "--quiet", "--dest", folder, *requirements)


def build_wheel(
    python: str, sources: Path, requirements: Path, platform: str, defines: list[str], out: Path
) -> Path:
    """Builds a wheel without a network and makes it portable. The wheels of all Pythons share what
    does not depend on Python, the kernels, in one build folder."""
    raw = out / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    options = ["-C", f"build-dir={sources.parent / 'build'}"]
    options += [word for define in defines for word in ("-C", f"cmake.define.{define}")]
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(requirements)}
    start = time.monotonic()
    wheel = (python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", raw)
    run(*wheel, sources, *options, environment=offline)
    print(f"built in {time.monotonic() - start:.0f} s", flush=True)
    (built,) = raw.glob("*.whl")
    run(BIN / "auditwheel", "show", built)
    before = {*out.glob("*.whl")}
    run(BIN / "auditwheel", "repair", "--plat", platform, "--wheel-dir", out, built)
    (repaired,) = {*out.glob("*.whl")} - before
    shutil.rmtree(raw)
    return repaired


def smoke_test(python: str, wheel: Path, extra: str, backends: list[str], environment: Path) -> None:
    """Installs a wheel into an empty environment and tries its backends."""
    shutil.rmtree(environment, ignore_errors=True)
    run(python, "-m", "venv", environment)
    interpreter = environment / "bin/python"
    run(interpreter, "-m", "pip", "install", "--quiet", wheel)
    run(interpreter, "-c", WITHOUT_FRAMEWORKS, environment=SAFE_PATH)
    start = time.monotonic()
    run(interpreter, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]")
    run(interpreter, "-m", "shared_ffi", "--backend", *backends, environment=SAFE_PATH)
    print(f"installed with [{extra}] and tried in {time.monotonic() - start:.0f} s", flush=True)
    shutil.rmtree(environment)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python release/wheels.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--python", nargs="+", default=["python3.11", "python3.12"], help="the wheels' Pythons"
    )
    parser.add_argument(
        "--platform",
        default="auto",
        help="of the wheels, such as manylinux_2_28_x86_64; auto: the oldest that they run on",
    )
    parser.add_argument(
        "--define",
        nargs="*",
        default=["XLA_GPU_ARCHITECTURES=all"],
        metavar="NAME=VALUE",
        help="options of the build (default: kernels for every GPU)",
    )
    parser.add_argument("--extra", default="torch-xla", help="what is installed beside a wheel")
    parser.add_argument(
        "--backend",
        nargs="+",
        default=BACKENDS,
        help="backends that must work then (default: all to the CPU)",
    )
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    if out == OUT:
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"--out must be an empty folder; got {out}")
    for python in arguments.python:  # before anything is built
        if not is_interpreter(python):
            parser.error(f"--python must name interpreters that run here; got {python}")
    sdist = build_sdist(out)
    unpacked = out / "unpacked"
    shutil.unpack_archive(sdist, unpacked, filter="data")
    (sources,) = unpacked.iterdir()
    wheels: list[tuple[str, Path]] = []
    for python in arguments.python:
        requirements = out / "requirements"
        fetch_requirements(python, requirements)
        platform, defines = arguments.platform, arguments.define
        wheel = build_wheel(python, sources, requirements, platform, defines, out)
        shutil.rmtree(requirements)
        wheels.append((python, wheel))
    shutil.rmtree(unpacked)
    files = [sdist, *(wheel for _, wheel in wheels)]
    run(BIN / "twine", "check", "--strict", *files)
    # W009 is about several packages in one wheel, which these are.
    packages = "shared_ffi,jax_frontend,torch_frontend"
    run(BIN / "check-wheel-contents", "--ignore", "W009", "--toplevel", packages, *files[1:])
    for python, wheel in wheels:
        smoke_test(python, wheel, arguments.extra, arguments.backend, out / "environment")
    for file in files:
        print(f"{file.stat().st_size / 2**20:8.2f} MiB  {file.name}")


if __name__ == "__main__":
    main()
