"""``make gpu-check``: proves the CUDA kernels on this machine's GPU and measures them, in 10
minutes.

Builds for this GPU alone, runs the test suite's CUDA part and every door that is installed, lets
compute-sanitizer watch a few calls, and runs the benchmark. Each step is a process of its own: what
is missing or fails is said in the report and does not stop the rest. Writes report.json and
report.md. A step that went well on the same commit is not run again, unless --again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
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
    """Whether a command went well, and its last words. Its output goes to the log."""
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
    """What was measured on: GPU, driver, clocks, versions, commit."""
    fields = (
        "name,driver_version,compute_cap,clocks.max.sm,clocks.max.memory,memory.total,power.limit"
    )
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    values = [value.strip() for value in query.stdout.splitlines()[0].split(",")]
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        **dict(zip(fields.split(","), values, strict=True)),
        "python": sys.version.split()[0],
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str:
    outcome = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return outcome.stdout.strip() or "unknown"


def build_command(compute_capability: str, ffi_headers: Path | None) -> list[list[object]]:
    """Configures and builds for one GPU generation."""
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
    """Puts the module that was built beside the package's sources, where it is imported from."""
    (module,) = BUILD.glob("_native*.so")
    shutil.copy(module, ROOT / "shared_ffi" / module.name)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--ffi-headers", type=Path, help="the include folder of jaxlib 0.8.0")
    parser.add_argument("--again", action="store_true", help="run also what went well before")
    parser.add_argument("--only", nargs="*", help="names of steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "report.json"
    found = machine()
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if results.get("machine") != found or options.again:
        results = {"machine": found, "steps": {}}

    def step(name: str, command: Sequence[object], seconds: float, **environment: str) -> bool:
        if results["steps"].get(name, {}).get("ok"):
            return True
        if options.only and name not in options.only and name not in ("configure", "build"):
            return False
        start = time.monotonic()
        ok, last_words = run(command, seconds, options.out / f"{name}.log", **environment)
        results["steps"][name] = {
            "ok": ok,
            "seconds": round(time.monotonic() - start, 1),
            "last_words": last_words,
        }
        path.write_text(json.dumps(results, indent=2))
        print(f"{name}: {'ok' if ok else 'FAILED'}: {last_words}", flush=True)
        return ok

    configure, build = build_command(found["compute_cap"], options.ffi_headers)
    if not (step("configure", configure, 120) and step("build", build, 240)):
        sys.exit("the build failed; see its log")
    install_module()

    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=20"]
    step("kernels", [*pytest, "tests/test_cuda_kernel.py"], 150)
    step("doors", [*pytest, "tests/test_gpu_doors.py"], 150)
    for tool in SANITIZERS:
        watched = [sys.executable, "-m", "benchmarks.gpu.sanitize"]
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        step(tool, [*sanitizer, *watched], 100, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    measured = options.out / "bench.json"
    bench = [sys.executable, "-m", "benchmarks.gpu.bench", "--out", measured, "--seconds", "180"]
    if options.trace:
        bench += ["--trace", options.trace]
    step("bench", bench, 280, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if measured.exists():
        results["bench"] = json.loads(measured.read_text())
    path.write_text(json.dumps(results, indent=2))
    (options.out / "report.md").write_text(report.markdown(results))
    report.show(results)
    sys.exit(0 if all(entry["ok"] for entry in results["steps"].values()) else 1)


if __name__ == "__main__":
    main()
