"""``make gpu-check``: proves the CUDA kernels on this machine's GPU and measures them.

In 10 minutes it builds for this GPU only, tests the CUDA kernels and every installed door, runs a
few calls under compute-sanitizer, and runs the benchmark. Each step is a process of its own: the
report shows what is missing or fails, and the other steps still run. Writes report.json and
report.md. On the same commit, a step that succeeded is not repeated unless --again is given.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.machine import versions

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/gpu"
PACKAGES = (
    *("jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "torch_xla", "triton"),
    *("flashinfer-python", "flash_attn_3"),
)
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run(
    command: Sequence[object], seconds: float, log: Path, **environment: str
) -> tuple[bool, str]:
    """Runs a command with its output in `log`. Returns whether it succeeded, and its last line."""
    with log.open("w") as file:
        try:
            outcome = subprocess.run(
                [str(word) for word in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                cwd=ROOT,
                env=os.environ
                | {"PYTHONPATH": _python_path(), "XLA_GPU_TEST_ON": "cuda"}
                | environment,
            )
            went_well = outcome.returncode == 0
        except subprocess.TimeoutExpired:
            went_well = False
            file.write(f"\nstopped after {seconds:.0f} s\n")
        except FileNotFoundError:
            return False, f"{command[0]} is not installed"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return went_well, lines[-1] if lines else ""


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def machine() -> dict[str, Any]:
    """Describes the machine: GPU, driver, clocks, versions, commit."""
    fields = (
        "name,driver_version,compute_cap,clocks.max.sm,clocks.max.memory,memory.total,power.limit"
    )
    if shutil.which("nvidia-smi") is None:
        sys.exit(
            "gpu-check: needs a machine with an NVIDIA GPU and its driver; found no nvidia-smi"
        )
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    values = [value.strip() for value in query.stdout.splitlines()[0].split(",")]
    return {
        **dict(zip(fields.split(","), values, strict=True)),
        "python": sys.version.split()[0],
        "versions": versions(PACKAGES),
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of the sources; GIT_COMMIT names it if they come without their history."""
    if commit := os.environ.get("GIT_COMMIT"):
        return commit
    outcome = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return outcome.stdout.strip() or "unknown"


def build_command(compute_capability: str, ffi_headers: Path | None) -> list[list[object]]:
    """The commands that configure and build for one GPU generation."""
    import nanobind  # noqa: PLC0415

    number = compute_capability.replace(".", "")
    architecture = {"90": "90a"}.get(number, number) + "-real"
    configure: list[object] = [
        *("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        f"-DXLA_GPU_ARCHITECTURES={architecture}",
    ]
    if ffi_headers is not None:
        configure.append(f"-DXLA_FFI_INCLUDE_DIR={ffi_headers.resolve()}")
    if "CUDACXX" not in os.environ and (nvcc := shutil.which("nvcc")):
        configure.append(f"-DCMAKE_CUDA_COMPILER={nvcc}")
    return [configure, ["cmake", "--build", BUILD]]


def install_module() -> None:
    """Copies the built module and library to where they are imported from: over the installed ones,
    or beside the package's sources."""
    (module,) = BUILD.glob("_native*.so")
    (library,) = BUILD.glob("libxla_paged_attention.so")
    try:
        installed = importlib.util.find_spec("shared_ffi._native")
    except ImportError:
        installed = None
    target = Path((installed and installed.origin) or ROOT / "shared_ffi" / module.name)
    shutil.copy(module, target)
    shutil.copy(library, target.parent)


class Steps:
    """The steps of a run. A step that succeeds runs once per machine and commit; a file keeps the
    outcomes from run to run.

    Args:
        folder: holds report.json and the steps' logs.
        found: the result of `machine()`; outcomes for another machine or commit are dropped.
        again: drop all outcomes.
        only: run only these steps.
        seconds: start no step after this time, and stop the step that is running then.
    """

    def __init__(
        self,
        folder: Path,
        found: dict[str, Any],
        again: bool = False,
        only: Sequence[str] | None = None,
        seconds: float = 590,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._only = folder, only
        self._path = folder / "report.json"
        self._deadline = time.monotonic() + seconds
        self.results: dict[str, Any] = {}
        if self._path.exists() and not again:
            self.results = json.loads(self._path.read_text())
        if self.results.get("machine") != found:
            self.results = {"machine": found, "steps": {}}

    def do(self, name: str, command: Sequence[object], seconds: float, **environment: str) -> bool:
        """Runs a step for at most `seconds`. Returns whether it succeeded, now or earlier."""
        outcomes = self.results["steps"]
        if outcomes.get(name, {}).get("ok"):
            return True
        if self._only is not None and name not in self._only:
            return False
        start = time.monotonic()
        seconds = min(seconds, self._deadline - start)
        if seconds > 0:
            ok, last_words = run(command, seconds, self._folder / f"{name}.log", **environment)
        else:
            ok, last_words = False, "no time was left; run the check once more"
        outcomes[name] = {
            "ok": ok,
            "seconds": round(time.monotonic() - start, 1),
            "last_words": last_words,
        }
        self.save()
        print(f"{name}: {'ok' if ok else 'FAILED'}: {last_words}", flush=True)
        return ok

    def save(self) -> None:
        """Writes report.json."""
        self._path.write_text(json.dumps(self.results, indent=2))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--ffi-headers", type=Path, help="the include folder of jaxlib 0.8.0")
    parser.add_argument("--again", action="store_true", help="do also what went well before")
    parser.add_argument("--only", nargs="*", help="names of steps to do besides the build")
    parser.add_argument("--seconds", type=float, default=590, help="for everything together")
    options = parser.parse_args()
    found = machine()
    only = None if options.only is None else ["configure", "build", *options.only]
    steps = Steps(options.out, found, options.again, only, options.seconds)

    configure, build = build_command(found["compute_cap"], options.ffi_headers)
    if not (steps.do("configure", configure, 120) and steps.do("build", build, 240)):
        sys.exit("the build failed; see its log")
    install_module()

    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20"]
    kernels = [*pytest, "tests/kernels/test_cuda_kernel.py"]
    steps.do("kernels", [*kernels, "-k", "not hopper"], 150)
    steps.do("doors", [*pytest, "tests/doors/test_gpu_doors.py"], 150)

    def sanitize(suffix: str = "", **environment: str) -> None:
        for tool in SANITIZERS:
            watched = [sys.executable, "-m", "tests.support.sanitize"]
            sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
            environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            steps.do(tool + suffix, [*sanitizer, *watched], 100, **environment)

    sanitize()
    # A step of its own: a kernel that hangs or breaks the device fails the whole step.
    is_hopper = found["compute_cap"] == "9.0"
    is_proven = is_hopper and steps.do("kernels, hopper", [*kernels, "-k", "hopper"], 100)
    measured = options.out / "bench.json"
    bench = [sys.executable, "-m", "benchmarks.gpu.bench", "--out", measured, "--seconds", "180"]
    if options.trace:
        bench += ["--trace", options.trace]
    if not is_proven:
        bench += ["--no-hopper"]
    steps.do("bench", bench, 280, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if is_hopper:
        sanitize(", hopper", XLA_GPU_CUDA_PREFILL="hopper")
    if measured.exists():
        steps.results["bench"] = json.loads(measured.read_text())
    steps.save()
    (options.out / "report.md").write_text(report.markdown(steps.results))
    report.show(steps.results)
    sys.exit(0 if all(entry["ok"] for entry in steps.results["steps"].values()) else 1)


if __name__ == "__main__":
    main()
