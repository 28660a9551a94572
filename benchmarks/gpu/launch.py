"""Short programs that gpu-check runs: does the module load, are its kernels equal to the plain one,
are replays of a graph equal, and what does a profiler say of single launches."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from benchmarks import contest
from benchmarks.gpu import bench

SECTIONS = (
    "LaunchStats",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "SchedulerStats",
    "SourceCounters",
    "SpeedOfLight",
    "WarpStateStats",
)


def load(device: str) -> None:
    """Computes on a device, and says with which module."""
    import torch_frontend  # noqa: F401, PLC0415
    from shared_ffi import _native  # noqa: PLC0415

    assert device in _native.handlers(), f"{_native.__file__} has no handlers for {device}"
    a = torch.ones(1000, device=device)
    assert (torch.ops.xla_gpu.simple_add(a, a) == 2).all()
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(_native.__file__, "computes on", name)


def compare(device: str) -> None:
    """Compares the kernels in use with the plain one."""
    from shared_ffi.selftest import smoke_step  # noqa: PLC0415

    print(smoke_step.in_torch(device))


def contestants(rows: Sequence[str], is_rehearsal: bool) -> dict[str, list[contest.Contestant]]:
    """This library's calls of each row, on copies of its workload."""
    found, device = {}, "cpu" if is_rehearsal else "cuda"
    for name in rows:
        workload = bench.workload_of(name)
        make = contest.ours_with_hint if workload.kind == "decode" else contest.ours
        copies = contest.copies_past_the_cache(workload, device)
        found[name] = [make(workload, workload.operands(device, i)) for i in range(copies)]
    return found


def replay(rows: Sequence[str], times: int, is_rehearsal: bool) -> None:
    """Replays a graph of 64 calls, and asserts that each replay has the first one's bits."""
    for name, calls in contestants(rows, is_rehearsal).items():
        calls = (calls * 64)[:64]
        run = (
            (lambda calls=calls: [x() for x in calls]) if is_rehearsal else contest.in_one_go(calls)
        )
        first = [x.clone() for x in contest.wait_for(run())]
        for i in range(times):
            equal = [(x == y).all() for x, y in zip(first, run(), strict=True)]
            assert torch.stack(equal).all(), f"{name}: replay {i} has other bits"
        print(f"{name}: {times} replays of 64 calls have the same bits")


def launch(rows: Sequence[str], is_rehearsal: bool) -> None:
    """Makes a call of each row inside the range that a profiler looks at, after an addition."""
    mark = torch.ones(1, device="cpu" if is_rehearsal else "cuda")
    for name, calls in contestants(rows, is_rehearsal).items():
        for call in calls * -(-40 // len(calls)):
            contest.wait_for(call())
        print(f"last call of {name}", flush=True)
        if not is_rehearsal:
            torch.cuda.profiler.start()
            torch.ops.xla_gpu.simple_add(mark, mark)
        contest.wait_for(calls[0]())
        if not is_rehearsal:
            torch.cuda.profiler.stop()


MOMENTS = ("ready", "scheduled", "copies", "first tile", "last tile", "finished")


def stamp(rows: Sequence[str], out: Path, is_rehearsal: bool) -> None:
    """Writes what a build with XLA_GPU_STAMPS prints of each row's last call."""
    program = launch_program(rows, is_rehearsal)
    text = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout
    out.write_text(json.dumps({} if is_rehearsal else clocks(text, rows)))


def clocks(text: str, rows: Sequence[str]) -> dict[str, dict[str, float]]:
    """The cycles from a thread block's begin to each moment: the median of those blocks that got
    work, in the last call of each row."""
    found = {}
    for row in rows:
        last_call = text[text.find(f"last call of {row}\n") :].splitlines()[1:]
        blocks = [
            [int(clock) for clock in line.split()[1:]]
            for line in takewhile(lambda line: line.startswith("stamps "), last_call)
        ]
        worked = [clocks for clocks in blocks if all(clocks)]
        assert worked, f"{row}: no thread block has stamped every moment"
        found[row] = {
            moment: statistics.median(clocks[i] - clocks[0] for clocks in worked)
            for i, moment in enumerate(MOMENTS, 1)
        }
    return found


def launch_program(rows: Sequence[str], is_rehearsal: bool) -> list[str]:
    """The command of `launch` with the module in use."""
    used = sys.modules.get("shared_ffi._native")
    module = [] if used is None else ["--module", str(used.__file__)]
    program = [sys.executable, "-m", "benchmarks.gpu", *module, "benchmarks.gpu.launch", "launch"]
    return [*program, *rows, *(["--rehearse"] if is_rehearsal else [])]


def profile(rows: Sequence[str], out: Path, is_rehearsal: bool) -> None:
    """Runs `launch` under ncu with the caches and clocks of real use, and writes its counters."""
    program = launch_program(rows, is_rehearsal)
    if is_rehearsal:
        subprocess.run(program, check=True)
        return
    kept = out.with_suffix(".ncu-rep")
    options = ["--cache-control", "none", "--clock-control", "none", "--profile-from-start", "off"]
    options += ["--kernel-name", "regex:Attention|Add", "--force-overwrite", "--export", str(kept)]
    for section in SECTIONS:
        options += ["--section", section]
    subprocess.run(["ncu", *options, *program], check=True)
    pages = ["ncu", "--import", str(kept), "--page", "raw", "--csv"]
    text = subprocess.run(pages, check=True, stdout=subprocess.PIPE, text=True).stdout
    out.write_text(json.dumps(counters(text, rows)))


def counters(text: str, rows: Sequence[str]) -> dict[str, dict[str, float]]:
    """The counters on ncu's raw page, by row: of the kernel of attention that took longest. An
    addition goes before each row's kernels."""
    lines = text[text.index('"ID"') :].splitlines()
    _, *launches = csv.DictReader(lines)  # the first says the units
    found: list[list[dict[str, float]]] = []
    for values in launches:
        if "Attention" in values["Kernel Name"]:
            found[-1].append(numbers(values))
        else:
            found.append([])
    return {
        row: max(kernels, key=lambda kernel: kernel["gpu__time_duration.sum"])
        for row, kernels in zip(rows, found, strict=True)
    }


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """What is a number."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = float(value.replace(",", ""))
        except (AttributeError, ValueError):
            continue
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="launch", description=__doc__)
    parser.add_argument(
        "what", choices=("import", "compare", "replay", "launch", "stamp", "profile")
    )
    parser.add_argument("names", nargs="*", help="the device, or rows")
    parser.add_argument("--times", type=int, default=2000, help="replays of a graph")
    parser.add_argument("--out", type=Path, help="where stamp and profile write")
    parser.add_argument("--rehearse", action="store_true", help="small rows, on the CPU")
    options = parser.parse_intermixed_args()  # options come between names
    if options.what in ("import", "compare"):
        (load if options.what == "import" else compare)(*options.names)
    elif options.what in ("stamp", "profile"):
        (stamp if options.what == "stamp" else profile)(
            options.names, options.out, options.rehearse
        )
    elif options.what == "replay":
        replay(options.names, options.times, options.rehearse)
    else:
        launch(options.names, options.rehearse)
