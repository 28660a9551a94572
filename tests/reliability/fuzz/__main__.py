"""Tries calls at random for a given time: `python -m tests.reliability.fuzz --seconds 60`.

The trials run in a process of their own. If it crashes, the trial that it was at is known. A trial
that fails is made as small as it can be and written to a file, and the command that repeats it is
printed; `test_fuzz.py` replays those of `former_failures.json`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.reliability.fuzz import draw
from tests.reliability.fuzz.trials import FAMILIES, Trial, load, save, simpler

MODULE = "tests.reliability.fuzz"
ROOT = Path(__file__).parents[3]
MOST_FAILURES = 10  # after which a campaign ends
SECONDS_OF_A_TRIAL = 120  # of one that is repeated after a crash


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--seconds", type=float, help="how long to run")
    parser.add_argument("--trials", type=int, help="how many trials of each family to run")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign")
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--family", nargs="*", default=[*FAMILIES], choices=FAMILIES)
    parser.add_argument(
        "--backend", nargs="*", default=["eager", "jax"], choices=["eager", "jax", "torch_xla"]
    )
    parser.add_argument("--instruction-set", nargs="*", default=[], help="all if none is named")
    parser.add_argument(
        "--emulated", nargs="?", const="", help="run the emulated GPU instead; the module's path"
    )
    parser.add_argument("--native", help="the path of another build of shared_ffi._native")
    parser.add_argument("--repeat", type=Path, nargs="+", help="only the trials in these files")
    parser.add_argument("--out", type=Path, default=Path("report/fuzz"), help="where files go")
    parser.add_argument("--progress", help=argparse.SUPPRESS)  # of the process that runs trials
    return parser.parse_args(arguments)


def make_runner(options: argparse.Namespace) -> Any:
    """What runs the trials. Loads the frameworks that it needs."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    from tests.support import native  # noqa: PLC0415  (settings above come first)

    if options.native:
        native.load(options.native, "shared_ffi._native")
    from tests.reliability.fuzz import run  # noqa: PLC0415

    if options.emulated is not None:
        return run.EmulatedRunner(native.emulated(options.emulated or None))
    return run.CpuRunner(options.backend, options.instruction_set)


def failure_of(trial: Trial, runner: Any) -> tuple[str, str] | None:
    """The promise that a trial breaks, and the message. An error that no promise foresees is a
    failure, too."""
    from tests.reliability.fuzz.run import Failure  # noqa: PLC0415

    try:
        runner.run(trial)
    except Failure as failure:
        return failure.promise, str(failure)
    except Exception as error:
        return type(error).__name__, f"{type(error).__name__}: {error}"
    return None


def minimized(trial: Trial, promise: str, broken_by: Callable[[Trial], str | None]) -> Trial:
    """The simplest trial found that breaks the same promise."""
    while True:
        for candidate in simpler(trial):
            if broken_by(candidate) == promise:
                trial = candidate
                break
        else:
            return trial


def report(trial: Trial, name: str, promise: str, message: str, options: Any) -> None:
    """Writes a failed trial to a file and prints what repeats it."""
    path = options.out / f"{name.replace(' ', '-')}.json"
    save(trial, path, promise=promise, message=message)
    print(f"\nFAILED {name}: {message}\n  repeat: {repeat_command(path, options)}", flush=True)


def repeat_command(path: Path, options: argparse.Namespace) -> str:
    """The command that repeats the trial in a file."""
    words = ["python", "-m", MODULE, "--repeat", str(path), *settings(options)]
    return " ".join(words)


def settings(options: argparse.Namespace) -> list[str]:
    """The options that choose where trials run."""
    words = ["--backend", *options.backend]
    if options.instruction_set:
        words += ["--instruction-set", *options.instruction_set]
    if options.emulated is not None:
        words += ["--emulated", *([options.emulated] if options.emulated else [])]
    if options.native:
        words += ["--native", options.native]
    return words


def work(options: argparse.Namespace) -> int:
    """Runs trials from `first` on, and prints the counts as JSON at the end."""
    runner = make_runner(options)
    with open(options.progress, "r+b") as file:
        progress = mmap.mmap(file.fileno(), 0)
    counts: Counter[str] = Counter()
    failures, deadline = 0, time.monotonic() + (options.seconds or 1e9)
    number = options.first
    last = number + options.trials if options.trials else sys.maxsize
    while number < last and time.monotonic() < deadline and failures < MOST_FAILURES:
        group = range(number, min(last, (number // draw.GROUP + 1) * draw.GROUP))
        for family in options.family:
            for number in group:
                progress[:64] = f"{family} {number}".encode().ljust(64)
                trial = draw.trial(options.seed, family, number)
                counts[family] += 1
                counts["updates" if trial.op == "kv_cache_update" else "attention"] += 1
                failed = failure_of(trial, runner)
                if failed is None or failures == MOST_FAILURES:
                    continue
                failures += 1
                promise, _ = failed
                small = minimized(trial, promise, lambda x: (failure_of(x, runner) or (None,))[0])
                name = f"{options.seed} {family} {number}"
                report(small, name, promise, (failure_of(small, runner) or failed)[1], options)
        number = group.stop
    print(json.dumps({"counts": counts | runner.calls, "failures": failures, "next": number}))
    return 1 if failures else 0


def crashes(trial: Trial, options: argparse.Namespace) -> str | None:
    """How a process ends that runs a trial: None if it does not crash."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        save(trial, Path(file.name))
        command = [sys.executable, "-m", MODULE, "--repeat", file.name, *settings(options)]
        outcome = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS_OF_A_TRIAL)
    return "crash" if outcome.returncode not in (0, 1) else None


def supervise(options: argparse.Namespace) -> int:
    """Runs the trials in another process, and starts it again behind a trial that crashes it."""
    began, failures, total = time.monotonic(), 0, Counter[str]()
    end = options.first + options.trials if options.trials else None
    families = options.family
    with tempfile.NamedTemporaryFile() as progress:
        while failures < MOST_FAILURES:
            progress.truncate(64)
            command = [sys.executable, "-m", MODULE, *settings(options), "--family", *families]
            command += ["--seed", str(options.seed), "--first", str(options.first)]
            command += ["--progress", progress.name, "--out", str(options.out)]
            if options.seconds:
                left = options.seconds - (time.monotonic() - began)
                command += ["--seconds", str(max(0.001, left))]
            if end is not None:
                command += ["--trials", str(max(0, end - options.first))]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                if line.startswith("{"):
                    last = line
                else:
                    print(line, end="", flush=True)
            if process.wait() in (0, 1) and last:
                result = json.loads(last)
                total += Counter(result["counts"])
                failures += result["failures"]
                break
            progress.seek(0)
            family, number = progress.read(64).decode().split()
            failures += 1
            name = f"{options.seed} {family} {number}"
            trial = draw.trial(options.seed, family, int(number))
            if crashes(trial, options):
                trial = minimized(trial, "crash", lambda x: crashes(x, options))
            report(trial, name, "no crash", f"exit status {process.returncode}", options)
            options.first = int(number) + 1
    seconds = time.monotonic() - began
    print(f"seed {options.seed}, {seconds:.0f} s, {failures} failures")
    for name, count in sorted(total.items()):
        print(f"  {count:9,} {name}")
    return 1 if failures else 0


def repeat(options: argparse.Namespace) -> int:
    """Runs the trials of files."""
    runner, failures = make_runner(options), 0
    for trial in (trial for path in options.repeat for trial in load(path).values()):
        failed = failure_of(trial, runner)
        print(failed[1] if failed else "passed", flush=True)
        failures += failed is not None
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a trial fails."""
    options = parse(arguments)
    if options.repeat:
        return repeat(options)
    if options.progress:
        return work(options)
    if not (options.seconds or options.trials):
        options.seconds = 60
    return supervise(options)


if __name__ == "__main__":
    sys.exit(main())
