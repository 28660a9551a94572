"""``make gpu-check``: answers the questions of lab.json on this machine's GPU, proves the kernels
and measures the tables.

Each step of lab.json is a process of its own: the report shows what is missing or fails, and the
other steps still run. report.json and report.md are written after every step. A step that succeeded
with the same command and modules is not repeated, so a check that ran out of time is continued by
the same command, on another machine, too, if report.json lies there. Nothing is built: the package
is installed, or comes with --pack.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import pack, report
from benchmarks.machine import cpu, versions

ROOT = Path(__file__).parents[2]
LAB = Path(__file__).with_name("lab.json")
PACKAGES = ("jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "torch_xla", "triton")
# Where nvidia-cuda-sanitizer-api, a package that comes with a pack, has compute-sanitizer.
SANITIZER = "nvidia/cu13/compute-sanitizer/compute-sanitizer"


def run(command: str, seconds: float, log: Path, environment: dict[str, str]) -> tuple[bool, str]:
    """Runs a shell's command with its output in `log`. Returns whether it succeeded, and its last
    line. After `seconds` it is killed with all processes that it started."""
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": _python_path(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            | environment,
            process_group=0,
        )
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


def machine(is_rehearsal: bool) -> dict[str, Any]:
    """Describes the machine: GPU, driver, clocks, versions."""
    fields = (
        "name,driver_version,compute_cap,clocks.max.sm,clocks.max.memory,memory.total,power.limit"
    )
    values = [f"emulated GPU on {cpu()['processor']}", "none", "9.0", *"----"]
    if not is_rehearsal:
        if shutil.which("nvidia-smi") is None:
            sys.exit(
                "gpu-check: needs a machine with an NVIDIA GPU and its driver; found no nvidia-smi"
            )
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        values = [value.strip() for value in text.splitlines()[0].split(",")]
    return {
        **dict(zip(fields.split(","), values, strict=True)),
        "python": sys.version.split()[0],
        "versions": versions(PACKAGES),
    }


def expanded(text: str, names: Mapping[str, str]) -> str:
    """A command of lab.json with its {names} replaced, also those in what replaced them."""
    while True:
        wider = re.sub(r"\{(\w+)\}", lambda found: names[found[1]], text)
        if wider == text:
            return text
        text = wider


class Steps:
    """The steps of a run. A step that succeeds runs once for each command and modules; a file keeps
    the outcomes from run to run.

    Args:
        folder: holds the report, and the steps' logs and results.
        found: describes the machine; what was kept of another is dropped.
        modules: a digest by the name of each variant; "" is the module in use.
        again: drop what was kept of the steps to do.
        only: do only steps whose names begin with one of these.
        seconds: start no step that would end after this time.
    """

    def __init__(
        self,
        folder: Path,
        found: dict[str, Any],
        modules: Mapping[str, str],
        again: bool = False,
        only: Sequence[str] | None = None,
        seconds: float = 560,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._only, self._modules = folder.resolve(), only, modules
        self._path = self.folder / "report.json"
        self._deadline = time.monotonic() + seconds
        self.results: dict[str, Any] = {"machine": found, "steps": {}, "results": {}}
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        if kept.get("machine") == found:
            for name, step in kept["steps"].items():
                if not (again and self._is_wanted(name)):
                    self.results["steps"][name] = step
                    self.results["results"][name] = kept["results"].get(name)

    def out(self, name: str) -> Path:
        """Where a step writes its results."""
        return self.folder / f"{name}.json"

    def do(self, step: Mapping[str, Any], command: str) -> bool:
        """Does a step, for at most three times as long as lab.json says. Returns whether it
        succeeded, now or earlier.

        A step of tests that were all skipped has proved nothing and counts as left out.
        """
        name, outcomes = step["name"], self.results["steps"]
        of = self._modules if step.get("of_variants") else self._modules[step.get("variant", "")]
        identity = json.dumps([command, step.get("environment"), of])
        earlier = outcomes.get(name, {})
        is_same = earlier.get("identity") == identity
        if is_same and earlier.get("ok"):
            return True
        if not self._is_wanted(name):
            return False
        self.out(name).unlink(missing_ok=True)
        if is_same and (before := self.results["results"].get(name)):
            self.out(name).write_text(json.dumps(before))  # to be continued
        start = time.monotonic()
        left = self._deadline - start
        log = self.folder / f"{name}.log"
        if left >= step["seconds"]:
            limit = min(left, 3 * step["seconds"])
            ok, words = run(command, limit, log, step.get("environment", {}))
            if self.out(name).exists():
                self.results["results"][name] = json.loads(self.out(name).read_text())
        else:
            ok, words = False, f"{max(left, 0):.0f} s were left, and it takes {step['seconds']}"
        proved_nothing = ok and re.match(r"\d+ skipped", words)
        outcomes[name] = {
            "ok": None if proved_nothing else ok,
            "seconds": round(time.monotonic() - start, 1),
            "last_words": words,
            "identity": identity,
        }
        if not ok and log.exists():
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
        self.results["answers"] = report.answers(lab()["questions"], self.results["results"])
        self._path.write_text(json.dumps(self.results, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(report.markdown(self.results))

    @property
    def went_well(self) -> bool:
        """Whether no step failed."""
        return all(step["ok"] is not False for step in self.results["steps"].values())


def lab() -> dict[str, Any]:
    """The steps and the questions."""
    found: dict[str, Any] = json.loads(LAB.read_text())
    return found


def contestants_of(names: Iterable[str]) -> list[str]:
    """The variants that take part in contests: not those that serve one step alone."""
    alone = {step.get("variant") for step in lab()["steps"]}
    return [name for name in names if name not in alone]


def steps_of(modules: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The steps in their order. One that is done for each variant comes once for each."""
    for step in lab()["steps"]:
        if "variant" in step:
            yield step
            continue
        for variant in contestants_of(modules) if step.get("each") else [""]:
            name = f"{step['name']}, {variant}" if variant else step["name"]
            yield step | {"name": name, "variant": variant}


def check(
    steps: Steps, modules: Mapping[str, Path | None], names: Mapping[str, str], key: str
) -> None:
    """Does all steps.

    Args:
        modules: the path of ``_native`` of each variant; "" is the module in use, without a path.
        names: what stands for the {names} of the commands, beside those of lab.json.
        key: command, or rehearsal on a machine without a GPU.
    """
    for step in steps_of(modules):
        if key not in step:
            steps.leave_out(step["name"], step.get("left_out", "needs a GPU"))
            continue
        if step["variant"] not in modules:
            steps.leave_out(step["name"], f"the pack has no variant {step['variant']}")
            continue
        of_step = {"out": shlex.quote(str(steps.out(step["name"]))), "module": "", "native": ""}
        if path := modules[step["variant"]]:
            of_step["module"] = f"--module {shlex.quote(str(path))}"
            of_step["native"] = f"--native {shlex.quote(str(path))}"
        environment = step.get("environment", {}) if key == "command" else {}
        command = expanded(step[key], {**lab()["names"], **names, **of_step})
        steps.do(step | {"environment": environment}, command)


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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--pack", type=Path, help="a file that benchmarks.gpu.pack wrote")
    parser.add_argument("--winner", default="today", help="the variant to prove and to publish")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU; takes a pack, too")
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--again", action="store_true", help="do also what went well before")
    parser.add_argument("--only", nargs="*", help="how the names of the steps to do begin")
    parser.add_argument("--seconds", type=float, default=560, help="for everything together")
    options = parser.parse_args()
    start = time.monotonic()
    if options.rehearse and options.pack is None:
        parser.error("a rehearsal takes its emulated kernels from a pack made with --emulated")
    unpacked = (options.out / "pack").resolve()
    commit = os.environ.get("GIT_COMMIT") or pack.commit()
    modules: dict[str, Path | None] = {"": None}
    digests = {"": commit}
    if options.pack is not None:
        manifest = pack.unpack(options.pack, unpacked, options.winner)
        _unpacked.extend(str(path) for path in pack.paths(unpacked))
        sys.path.extend(_unpacked)
        commit = manifest["commit"]
        if options.winner != "today":
            commit = f"the variant {options.winner} beside {commit}"
        digests = {"": manifest["variants"].pop(options.winner), **manifest["variants"]}
        for name in digests:
            folder = unpacked / "variants" / (name or options.winner)
            modules[name] = next(folder.glob("_native*.so"))
    names = {
        "python": shlex.quote(sys.executable),
        "cores": str(min(os.cpu_count() or 1, 16)),
        "sanitizer": shlex.quote(newest_sanitizer()),
        "tools": shlex.quote(str(unpacked / "tools")),
        "variants": " ".join(
            f"--variant {shlex.quote(f'{name}={modules[name]}')}"
            for name in contestants_of(modules)
            if modules[name]
        ),
        "emulated": shlex.quote(str(next((unpacked / "emulated").glob("_native*.so"), ""))),
        "trace": f"--trace {shlex.quote(str(options.trace.resolve()))}" if options.trace else "",
    }
    left = options.seconds - (time.monotonic() - start)
    found = machine(options.rehearse)
    steps = Steps(options.out, found, digests, options.again, options.only, left)
    steps.results |= {"commit": f"commit {commit}", "date": time.strftime("%Y-%m-%d")}
    check(steps, modules, names, "rehearsal" if options.rehearse else "command")
    steps.save()
    print(report.summary(steps.results, steps_of(modules)))
    sys.exit(0 if steps.went_well else 1)


if __name__ == "__main__":
    main()
