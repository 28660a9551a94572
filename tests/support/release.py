"""A rehearsal of the release, ``make release-check``: builds the source distribution and from it a wheel for
each Python, checks them, tries each wheel in a fresh environment, and prints what all that took."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
ENGINE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/jax-engine.md").read_text(), re.S)[0]
"""A script that needs JAX and the wheel: it samples and trains."""
_TOOLS = ("build", "twine", "check-wheel-contents")


class Tried(NamedTuple):
    """A wheel in a fresh environment of a Python."""

    wheel: Path
    python: str
    seconds: float  # to install it with JAX
    mib: float  # of the environment
    printed: str  # by ENGINE


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """What a command prints. Ends this process with its output if it fails."""
    words = [str(word) for word in command]
    outcome = subprocess.run(
        words,
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if outcome.returncode:
        sys.exit(f"{' '.join(words)}: status {outcome.returncode}\n{outcome.stdout[-5000:]}")
    return outcome.stdout


def interpreters() -> dict[str, Path]:
    """The Pythons of PYTHONS that this machine has, by their versions."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        name = f"python{version}"
        candidates = [*sorted(pyenv.glob(f"{version}.*/bin/{name}")), shutil.which(name)]
        if version == "{}.{}".format(*sys.version_info):
            candidates.insert(0, sys.executable)
        for path in filter(None, candidates):
            asked = [path, "-c", "import sys; print(sys.base_prefix)"]
            outcome = subprocess.run(asked, capture_output=True, text=True)
            base = Path(outcome.stdout.strip()) / "bin" / name
            if outcome.returncode == 0 and base.exists():
                found[version] = base
                break
    return found


def new_environment(python: Path, folder: Path, *packages: object) -> Path:
    """An environment with some packages. Returns its folder of programs."""
    run(python, "-m", "venv", "--clear", folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", *packages)
    return folder / "bin"


def build(folder: Path, pythons: dict[str, Path], gpus: str) -> tuple[Path, dict[str, Path]]:
    """Builds and checks the source distribution and the wheels.

    Args:
        folder: for all files.
        pythons: as of ``interpreters``.
        gpus: what the CUDA kernels are for; empty: there are none.

    Returns:
        the source distribution, and the wheel of each Python. From 3.12 on there is one for all.
    """
    shutil.rmtree(folder, ignore_errors=True)
    tools = new_environment(next(iter(pythons.values())), folder / "tools", *_TOOLS)
    run(tools / "python", "-m", "build", "--sdist", "--outdir", folder / "dist", ROOT)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    wheels: dict[str, Path] = {}
    for version, python in pythons.items():
        if version != "3.11" and "3.12" in wheels:
            wheels[version] = wheels["3.12"]
            continue
        of_version = folder / version
        settings = [f"cmake.define.XLA_GPU_CUDA={'ON' if gpus else 'OFF'}"]
        settings += [f"cmake.define.XLA_GPU_ARCHITECTURES={gpus}"] if gpus else []
        options = [f"--config-settings={setting}" for setting in settings]
        pip = new_environment(python, folder / f"pip-{version}", "--upgrade", "pip") / "python"
        run(pip, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", of_version, *options, sdist)
        (wheels[version],) = of_version.glob("*.whl")
        if version != "3.11":
            wheels["3.12"] = wheels[version]
    files = [sdist, *dict.fromkeys(wheels.values())]
    run(tools / "twine", "check", "--strict", *files)
    toplevel = ",".join(PACKAGES)
    run(tools / "check-wheel-contents", "--ignore", "W009", "--toplevel", toplevel, *files[1:])
    return sdist, {version: wheels[version] for version in pythons}


def names(path: Path) -> list[str]:
    """The files in a wheel, or in a source distribution without its first folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.namelist()
    with tarfile.open(path) as archive:
        return [name.partition("/")[2] for name in archive.getnames()]


def try_wheel(wheel: Path, python: Path, folder: Path) -> Tried:
    """Installs a wheel with JAX in a fresh environment, and runs the self-test and the engine."""
    start = time.monotonic()
    programs = new_environment(python, folder / "environment", f"{wheel}[jax]")
    seconds = time.monotonic() - start
    on_cpu = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    run(programs / "xla-paged-attention", "check", "--backend", "jax-cpu", cwd=folder, **on_cpu)
    printed = run(programs / "python", "-c", ENGINE, cwd=folder, **on_cpu)
    sizes = [x.lstat().st_size for x in (folder / "environment").rglob("*") if not x.is_symlink()]
    return Tried(wheel, python.name.removeprefix("python"), seconds, sum(sizes) / 2**20, printed)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.release", description=__doc__)
    parser.add_argument("--gpus", default="", help="what the CUDA kernels are for, such as all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/release")
    options = parser.parse_args(arguments)
    pythons = interpreters()
    sdist, wheels = build(options.folder, pythons, options.gpus)
    print("\n| file | KiB | files |\n|---|---|---|")
    for path in (sdist, *dict.fromkeys(wheels.values())):
        print(f"| {path.name} | {path.stat().st_size / 1024:,.0f} | {len(names(path))} |")
    print("\n| Python | wheel | with JAX: s | MiB | the engine printed |\n|---|---|---|---|---|")
    for version, python in pythons.items():
        tried = try_wheel(wheels[version], python, options.folder)
        print(
            f"| {version} | {tried.wheel.name} | {tried.seconds:.0f} | {tried.mib:,.0f} "
            f"| {tried.printed.strip()} |",
            flush=True,
        )
    for version in [x for x in PYTHONS if x not in pythons]:
        print(f"| {version} | not tried: this machine does not have it | | | |")
    version = PROJECT["project"]["version"]
    print(f"\nWhat is left: git tag v{version} && git push origin v{version} (CONTRIBUTING.md).")


if __name__ == "__main__":
    main()
