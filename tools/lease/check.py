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
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.lease import pack, report
from tools.lease.report import lab
from tools.machine import cpu, versions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/gpu-check"
PACKAGES = ("jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch", "torch_xla", "triton")


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
        seconds: start no step that would end after this time.
        copies: a folder for copies of the report and of ncu's, or None.
    """

    def __init__(
        self,
        folder: Path,
        found: dict[str, Any],
        modules: Mapping[str, str],
        seconds: float = 560,
        copies: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._modules, self._copies = folder.resolve(), modules, copies
        self._path = self.folder / "report.json"
        self._deadline = time.monotonic() + seconds
        self.results: dict[str, Any] = {"machine": found, "steps": {}, "results": {}}
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        if kept.get("machine") == found:
            self.results |= {key: kept[key] for key in ("steps", "results")}

    def out(self, name: str) -> Path:
        """Where a step writes its results."""
        return self.folder / f"{name}.json"

    def do(self, step: Mapping[str, Any], command: str) -> bool:
        """Does a step, for at most twice as long as lab.json says. Returns whether it
        succeeded, now or earlier.

        A step of tests that were all skipped has proved nothing and counts as left out.
        """
        name, outcomes = step["name"], self.results["steps"]
        of = self._modules if "contestants" in step else self._modules[step.get("variant", "")]
        identity = json.dumps([command, step.get("environment"), of])
        earlier = outcomes.get(name, {})
        is_same = earlier.get("identity") == identity
        if is_same and earlier.get("ok"):
            return True
        self.out(name).unlink(missing_ok=True)
        if is_same and (before := self.results["results"].get(name)):
            self.out(name).write_text(json.dumps(before))  # to be continued
        start = time.monotonic()
        left = self._deadline - start
        log = self.folder / f"{name}.log"
        if left >= step["seconds"]:
            limit = min(left, 2 * step["seconds"])
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
        self.results["steps"][name] = {"ok": None, "seconds": 0, "last_words": reason}
        self._tell(name)

    def _tell(self, name: str) -> None:
        step = self.results["steps"][name]
        print(f"{name}: {report.OUTCOMES[step['ok']]}: {step['last_words']}", flush=True)
        self.save()

    def save(self) -> None:
        """Writes the report."""
        self.results["answers"] = report.answers(lab()["questions"], self.results["results"])
        self._path.write_text(json.dumps(self.results, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(report.markdown(self.results))
        if self._copies is not None:
            for path in (*self.folder.glob("report.*"), *self.folder.glob("*.ncu-rep")):
                shutil.copy2(path, self._copies)

    @property
    def went_well(self) -> bool:
        """Whether no step failed."""
        return all(step["ok"] is not False for step in self.results["steps"].values())


def steps_of(parts: Collection[int] = (), only: Iterable[str] = ("",)) -> list[dict[str, Any]]:
    """The steps of some parts, or all, whose names begin with one of these, in their order."""
    return [
        step
        for step in lab()["steps"]
        if (not parts or step["part"] in parts) and step["name"].startswith(tuple(only))
    ]


def check(
    steps: Steps,
    wanted: Iterable[Mapping[str, Any]],
    modules: Mapping[str, Path | None],
    names: Mapping[str, str],
    key: str,
) -> None:
    """Does steps.

    Args:
        modules: the path of ``_native`` of each variant; "" is the module in use, without a path.
        names: what stands for the {names} of the commands, beside those of lab.json.
        key: command, or rehearsal on a machine without a GPU.
    """
    for step in wanted:
        variant = step.get("variant", "")
        if key not in step:
            steps.leave_out(step["name"], step.get("left_out", "needs a GPU"))
            continue
        if variant not in modules:
            steps.leave_out(step["name"], f"the pack has no variant {variant}")
            continue
        of_step = {"out": shlex.quote(str(steps.out(step["name"]))), "module": "", "native": ""}
        if path := modules[variant]:
            of_step["module"] = f"--module {shlex.quote(str(path))}"
            of_step["native"] = f"--native {shlex.quote(str(path))}"
        environment = step.get("environment", {}) if key == "command" else {}
        command = expanded(step[key], {**lab()["names"], **names, **of_step})
        steps.do({**step, "environment": environment}, command)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.lease.check", description=__doc__)
    parser.add_argument("--pack", type=Path, help="a file that tools.lease.pack wrote")
    parser.add_argument("--winner", default="today", help="the variant to prove and to publish")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU; takes a pack, too")
    parser.add_argument("--part", type=int, nargs="*", default=[], help="of lab.json; all without")
    parser.add_argument("--only", nargs="*", default=[""], help="how the steps' names begin")
    parser.add_argument("--seconds", type=float, help="for everything; a part has its own")
    parser.add_argument("--copy-to", type=Path, help="a folder for copies of the report")
    options = parser.parse_args()
    start = time.monotonic()
    if options.rehearse and options.pack is None:
        parser.error("a rehearsal takes its emulated kernels from a pack made with --emulated")
    unpacked = FOLDER / "pack"
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
        "tools": shlex.quote(str(unpacked / "tools")),
        "variants": " ".join(
            f"--variant {shlex.quote(f'{name}={path}')}" for name, path in modules.items() if path
        ),
        "emulated_module": shlex.quote(str(next((unpacked / "emulated").glob("_native*.so"), ""))),
    }
    budgets = [lab()["parts"].get(str(part), 1e9) for part in options.part] or [1e9]
    left = (options.seconds or sum(budgets)) - (time.monotonic() - start)
    found = machine(options.rehearse)
    steps = Steps(FOLDER, found, digests, left, options.copy_to)
    steps.results |= {"commit": f"commit {commit}", "date": time.strftime("%Y-%m-%d")}
    wanted = steps_of(options.part, options.only)
    check(steps, wanted, modules, names, "rehearsal" if options.rehearse else "command")
    steps.save()
    print(report.summary(steps.results, steps_of()))
    sys.exit(0 if steps.went_well else 1)


if __name__ == "__main__":
    main()
