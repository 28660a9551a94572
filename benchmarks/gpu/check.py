"""``make gpu-check``: proves the CUDA kernels on this machine's GPU and measures them.

Tests the kernels, runs the benchmark, tests every installed backend and runs a few calls under
compute-sanitizer. Each step is a process of its own: the report shows what is missing or fails,
and the other steps still run. report.json and report.md are written after every step. A step that
succeeded on this machine and commit is not repeated, so a check that ran out of time is continued
by the same command. Nothing is built: the package is installed, or comes with --pack.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import pack, report
from benchmarks.machine import cpu, versions

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "torch_xla", "triton")
PYTEST = [sys.executable, "-m", "pytest", "--all", "-q", "-p", "no:cacheprovider", "--maxfail=20"]
# Warnings of later versions of the frameworks are no news of the kernels.
PYTEST += ["-o", "filterwarnings=default", "--tb=short"]
# One GPU serves all workers: what takes time is the oracle, on the CPU. A worker whose test does
# not end, or breaks its CUDA context, is replaced; capture=sys lets it say why.
PYTEST += ["-p", "xdist", "-n", str(min(os.cpu_count() or 1, 16)), "--dist", "worksteal"]
PYTEST += ["-p", "timeout", "--timeout", "60", "--capture", "sys"]
KERNELS = "tests/kernels/test_cuda_kernel.py"
IMPORT = """
import sys, torch, torch_frontend
from shared_ffi import _native
device = sys.argv[1]
assert device in _native.handlers(), f"{_native.__file__} has no handlers for {device}"
a = torch.ones(1000, device=device)
assert (torch.ops.xla_gpu.simple_add(a, a) == 2).all()
print(_native.__file__, "computes on", torch.cuda.get_device_name() if device == "cuda" else device)
"""
COMPARISON = """
from shared_ffi.selftest import smoke_step
print(smoke_step.in_torch("cuda"))
"""
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Where nvidia-cuda-sanitizer-api, a package that comes with a pack, has compute-sanitizer.
SANITIZER = "nvidia/cu13/compute-sanitizer/compute-sanitizer"


def run(
    command: Sequence[object], seconds: float, log: Path, **environment: str
) -> tuple[bool, str]:
    """Runs a command with its output in `log`. Returns whether it succeeded, and its last line.

    After `seconds` it is killed with all processes that it started.
    """
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ
                | {"PYTHONPATH": _python_path(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
                | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                | environment,
                process_group=0,
            )
        except FileNotFoundError:
            return False, f"{command[0]} is not installed"
        try:
            went_well = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            went_well = False
            file.write(f"\nstopped after {seconds:.0f} s\n")
        finally:
            _kill(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return went_well, lines[-1] if lines else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a process and of those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *_unpacked, *filter(None, [os.environ.get("PYTHONPATH")])])


_unpacked: list[str] = []  # folders of packages that came with a pack


def machine(commit: str) -> dict[str, Any]:
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
        "commit": commit,
        "sources": pack.sources(),
    }


def emulated_machine(commit: str) -> dict[str, Any]:
    """Describes this machine, for a rehearsal without a GPU."""
    return {
        "name": f"emulated GPU on {cpu()['processor']}",
        "driver_version": "none",
        "clocks.max.sm": "-",
        "clocks.max.memory": "-",
        "python": sys.version.split()[0],
        "versions": versions(PACKAGES),
        "commit": commit,
        "sources": pack.sources(),
    }


class Steps:
    """The steps of a run. A step that succeeds runs once per machine and commit; a file keeps the
    outcomes from run to run.

    Args:
        folder: holds the report, the benchmark's rows and the steps' logs.
        found: describes machine and commit; what was kept of another is dropped.
        again: drop what was kept of the steps to do.
        only: do only steps whose names begin with one of these.
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
        folder = folder.resolve()
        self._folder, self._only = folder, only
        self._path, self._rows = folder / "report.json", folder / "benchmark.json"
        self._deadline = time.monotonic() + seconds
        self.results: dict[str, Any] = {"machine": found, "steps": {}}
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        is_current = kept.get("machine") == found
        if is_current:
            self.results["steps"] = {
                name: step
                for name, step in kept["steps"].items()
                if not (again and self._is_wanted(name))
            }
        if not is_current or (again and self._is_wanted("benchmark")):
            self._rows.unlink(missing_ok=True)
        self.save()

    def do(self, name: str, command: Sequence[object], seconds: float, **environment: str) -> bool:
        """Does a step for at most `seconds`. Returns whether it succeeded, now or earlier.

        A step of tests that were all skipped has proved nothing and counts as left out.
        """
        outcomes = self.results["steps"]
        if outcomes.get(name, {}).get("ok"):
            return True
        if not self._is_wanted(name):
            return False
        start = time.monotonic()
        seconds = min(seconds, self._deadline - start)
        log = self._folder / f"{name.replace('/', ' of ')}.log"
        if seconds > 0:
            ok, last_words = run(command, seconds, log, **environment)
        else:
            ok, last_words = False, "no time was left; run the check once more"
        proved_nothing = ok and re.match(r"\d+ skipped", last_words)
        outcomes[name] = {
            "ok": None if proved_nothing else ok,
            "seconds": round(time.monotonic() - start, 1),
            "last_words": last_words,
        }
        if not ok and seconds > 0 and log.exists():
            outcomes[name]["log"] = log.read_text(errors="replace")[-4000:]
        self._tell(name)
        return ok and not proved_nothing

    def leave_out(self, name: str, reason: str) -> None:
        """Reports a step that this machine cannot do, which is no failure."""
        if self._is_wanted(name):
            self.results["steps"][name] = {"ok": None, "seconds": 0, "last_words": reason}
            self._tell(name)

    def _tell(self, name: str) -> None:
        step = self.results["steps"][name]
        print(f"{name}: {report.OUTCOMES[step['ok']]}: {step['last_words']}", flush=True)
        self.save()

    def _is_wanted(self, name: str) -> bool:
        return self._only is None or name.startswith(tuple(self._only))

    def save(self) -> None:
        """Writes the report."""
        if self._rows.exists():
            self.results["benchmark"] = json.loads(self._rows.read_text())
        self._path.write_text(json.dumps(self.results, indent=2))
        (self._folder / "report.md").write_text(report.markdown(self.results))

    def benchmark(self, *options: object, seconds: float, **environment: str) -> bool:
        """Does the benchmark's step."""
        seconds = min(seconds, self._deadline - time.monotonic())
        command = [sys.executable, "-m", "benchmarks.gpu.bench", "--out", self._rows, *options]
        # Kernels of one program run one after the other; command buffers may run them at once.
        environment = environment | {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
        return self.do("benchmark", [*command, "--seconds", seconds - 30], seconds, **environment)

    @property
    def went_well(self) -> bool:
        """Whether no step failed."""
        return all(step["ok"] is not False for step in self.results["steps"].values())


def check(steps: Steps, is_hopper: bool, trace: Sequence[object]) -> None:
    """The steps on a GPU: what everything else rests on comes first, what is slow last."""
    on_cuda, portable = {"XLA_GPU_TEST_ON": "cuda"}, {"XLA_GPU_CUDA_KERNELS": "portable"}
    steps.do("import", [sys.executable, "-c", IMPORT, "cuda"], 60)
    steps.do("kernels", [*PYTEST, KERNELS, "-k", "not hopper"], 200, **on_cuda)
    # A step of its own: a kernel that hangs or breaks the device fails the whole step.
    hopper = [*PYTEST, KERNELS, "-k", "hopper"]
    is_proven = is_hopper and steps.do("kernels for Hopper", hopper, 200, **on_cuda)
    # The portable ones alone, where the others are not proven.
    in_use = portable if is_hopper and not is_proven else {}
    comparison = [sys.executable, "-c", COMPARISON]
    steps.do("comparison", comparison, 60, **in_use)
    steps.benchmark(*trace, seconds=270, **in_use)
    for backend, chosen in BACKENDS.items():
        command = [*PYTEST, "tests/backends/test_gpu.py", "-k", chosen]
        steps.do(f"backends, {backend}", command, 200, **on_cuda, **in_use)
    sanitizer = newest_sanitizer()
    for kernels_of, environment in {"portable": portable, "by GPU": {}}.items():
        if kernels_of == "by GPU" and not is_hopper:
            continue
        for tool in SANITIZERS:
            name = f"{tool}, {kernels_of}"
            if tool == "racecheck" and kernels_of == "by GPU":
                steps.leave_out(name, "racecheck takes copies that arrive at an mbarrier for races")
                continue
            command = [sanitizer, "--tool", tool, "--error-exitcode", "1"]
            command += [sys.executable, "-m", "tests.support.compute_sanitizer"]
            environment = environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            steps.do(name, command, 100, **environment)


# The backends' tests by what their names hold: each is in one group.
BACKENDS = {
    "torch": "torch and not torch_xla",
    "cuda_graph": "cuda_graph",
    "jax": "jax",
    "inductor": "inductor",
    "others": "not (jax or cuda_graph or inductor or torch and not torch_xla)",
}


def newest_sanitizer() -> str:
    """The newest compute-sanitizer of the machine and of the packages that Python finds."""
    found = {"compute-sanitizer": (0, 0)}
    for path in (shutil.which("compute-sanitizer"), *(Path(x, SANITIZER) for x in sys.path)):
        if path is None or not Path(path).exists():
            continue
        outcome = subprocess.run([path, "--version"], capture_output=True, text=True)
        if version := re.search(r"Version (\d+)\.(\d+)", outcome.stdout):
            found[str(path)] = (int(version[1]), int(version[2]))
    return max(found, key=lambda path: found[path])


def rehearse(steps: Steps, emulated: Path) -> None:
    """The same steps on a machine without a GPU, with a share of the tests of each."""
    steps.do("import", [sys.executable, "-c", IMPORT, "cpu"], 60)
    kernels = [*PYTEST, KERNELS, "--emulated", emulated]
    for i in (1, 2):
        share = ["-k", "not hopper", "--shard", f"{i}/10"]
        steps.do(f"kernels {i}/10", [*kernels, *share], 120)
    steps.do("kernels for Hopper", [*kernels, "-k", "hopper", "--shard", "1/10"], 200)
    steps.benchmark("--rehearse", seconds=120)
    backends = [*PYTEST, "tests/backends/test_parity.py"]
    for i in (1, 2):
        steps.do(f"backends {i}/20", [*backends, "--shard", f"{i}/20"], 120)
    for tool in SANITIZERS:
        steps.leave_out(tool, "needs a GPU")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--pack", type=Path, help="a folder that benchmarks.gpu.pack wrote")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU; takes a pack, too")
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--again", action="store_true", help="do also what went well before")
    parser.add_argument("--only", nargs="*", help="how the names of the steps to do begin")
    parser.add_argument("--seconds", type=float, default=590, help="for everything together")
    options = parser.parse_args()
    start = time.monotonic()
    if options.rehearse and options.pack is None:
        parser.error("a rehearsal takes its emulated kernels from a pack made with --emulated")
    unpacked, commit = options.out / "pack", os.environ.get("GIT_COMMIT") or pack.commit()
    if options.pack is not None:
        manifest = pack.unpack(options.pack, unpacked)
        commit = manifest["commit"] if commit == "unknown" else commit
        _unpacked.extend(str(path.resolve()) for path in pack.paths(unpacked))
        sys.path.extend(_unpacked)
        if manifest["missing"]:
            print(f"not in the pack: {', '.join(manifest['missing'])}")
    found = (emulated_machine if options.rehearse else machine)(commit)
    left = options.seconds - (time.monotonic() - start)
    steps = Steps(options.out, found, options.again, options.only, left)
    if options.rehearse:
        (module,) = (unpacked / "emulated").glob("_native*.so")
        try:
            rehearse(steps, module.resolve())
        finally:
            pack.remove_module()
    else:
        trace = ["--trace", options.trace.resolve()] if options.trace else []
        check(steps, found["compute_cap"] == "9.0", trace)
    report.show(steps.results)
    sys.exit(0 if steps.went_well else 1)


if __name__ == "__main__":
    main()
