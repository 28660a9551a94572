"""A contest on the GPU: workloads beside the GPU's limits, other builds and other libraries.

A step of lab.json says which rows there are and who takes part, in which process.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Mapping
from concurrent.futures import BrokenExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import Prepared, described, medians, seconds
from benchmarks.gpu.peers import PACKAGES
from benchmarks.gpu.process import MAKERS, Process
from benchmarks.kept import by_row
from benchmarks.workloads import Workload, uniform
from harness.workload import MODELS
from tools.lease.report import lab
from tools.machine import versions

CACHE_DTYPES = ("float8_e4m3fn", "int8")
REHEARSAL = ("decode b2 x 256, tiny", "prefill 256, tiny")  # rows for a machine without a GPU


def workload_of(row: str) -> Workload:
    """The workload that a row's name says.

    "decode b32 x 8192" has 32 sequences with 8192 positions, "prefill 1024" one of 1024 tokens, and
    "mixed 512 on 8192 beside 32 decodes" 512 tokens after 8192 others, and decodes of 4096. Behind
    commas stand a model in place of llama-3-8b, "blocks of 64", the dtype of an 8-bit cache, and
    "4096 in common": as many positions of whole blocks that all sequences begin with.
    """
    kind, _, name = row.partition(" ")
    size, *words = name.split(", ")
    model, block_size, cache_dtype, shared = MODELS["llama-3-8b"], 16, None, 0
    for word in words:
        if word in MODELS:
            model = MODELS[word]
        elif word in CACHE_DTYPES:
            cache_dtype = word
        elif found := re.fullmatch(r"blocks of (\d+)", word):
            block_size = int(found[1])
        elif found := re.fullmatch(r"(\d+) in common", word):
            shared = int(found[1])
        else:
            rule = "a row names a model, a dtype, blocks or what is in common"
            raise ValueError(f"{rule}; got {word!r} in {row!r}")
    patterns = {
        "decode": r"b(\d+) x (\d+)",
        "prefill": r"(\d+)()",
        "mixed": r"(\d+) on (\d+)(?: beside (\d+) decodes)?",
    }
    found = re.fullmatch(patterns.get(kind, "$^"), size)
    if found is None:
        raise ValueError(f"a row is decode bN x N, prefill N or mixed N on N; got {row!r}")
    first, second, *decodes = (int(number or 0) for number in found.groups())
    if kind == "decode":
        sequences = uniform(first, 1, second)
    else:
        sequences = ((first, second + first), *uniform(sum(decodes), 1, 4096))
    return Workload(
        *(name, kind, model, sequences, block_size),
        cache_dtype=cache_dtype,
        shared_blocks=shared // block_size,
    )


def chosen(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that match a pattern, as in a shell."""
    patterns = list(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def limits(device: str) -> dict[str, float]:
    """Bytes read, bytes copied and FLOP multiplied per second, for large tensors."""
    source = torch.randn(1 << 30 if device == "cuda" else 1 << 24, device=device)
    target = torch.empty_like(source)
    size = 8192 if device == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = medians(
        seconds(
            {
                "sum": source.sum,
                "max": source.max,
                "copy": lambda: target.copy_(source),
                "matmul": lambda: left @ right,
            }
        )
    )
    num_bytes = source.numel() * 4
    return {
        "read_bytes_per_s": num_bytes / min(times["sum"], times["max"]),
        "copy_bytes_per_s": 2 * num_bytes / times["copy"],
        "matmul_flops_per_s": 2 * size**3 / times["matmul"],
    }


def processes_of(step: Mapping[str, Any], modules: Mapping[str, Path]) -> dict[Process, list[str]]:
    """A step's processes, each with the names of its contestants.

    Args:
        step: its `contestants` are patterns by process: "" has the module in use, "*" stands for
            each variant that takes part, any other name is one of `environments`.
        modules: the path of each variant's module; "" is the module in use, if it has one.
    """
    variants = lab()["variants"]
    taking_part = [
        name
        for name in modules
        if name and step["name"] in variants.get(name, {}).get("steps", [step["name"]])
    ]
    found = {}
    for name, patterns in step.get("contestants", {}).items():
        environment = step.get("environments", {}).get(name)
        for process in taking_part if name == "*" else [name]:
            module = modules.get(process) or modules.get("")
            is_wrong = variants.get(process, {}).get("wrong", False)
            found[Process(process, module, environment, is_wrong)] = chosen(MAKERS, patterns)
    return found


def row_of(
    workload: Workload, device: str, processes: Mapping[Process, list[str]], calls: int = 1
) -> dict[str, Any]:
    """The row of a workload: what `described` says, the gauges of each contestant's turns, and
    whether a variant's results have the bits of the module in use."""
    found = Prepared()
    contestants: dict[str, tuple[Process, str, int]] = {}
    gauges: dict[str, list[dict[str, float]]] = {}
    for process, names in processes.items():
        prepared = process.prepare(workload, device, names, calls)
        found.errors |= prepared.errors
        found.bits |= prepared.bits
        found.absent |= prepared.absent
        for name in names:
            if process.full_name(name) not in prepared.absent:
                contestants[process.full_name(name)] = (process, name, prepared.calls)

    def take(contestant: tuple[Process, str, int], calls: int) -> float:
        process, name, calls_in_one_go = contestant
        seconds, read = process.turn(name, calls)
        gauges.setdefault(process.full_name(name), []).append(read)
        return seconds / calls_in_one_go

    budget = 0.02 if device == "cuda" else 0.05
    try:
        times = seconds(contestants, rounds=5, budget=budget, rest=0, take=take)
    except BrokenExecutor:  # a process died, and is left out from now on
        return row_of(workload, device, processes, calls)
    return described(workload, times, found) | {
        "gauges": {
            name: {key: statistics.median(x[key] for x in read) for key in read[0]}
            for name, read in gauges.items()
        },
        "same_bits": {
            name: bits == found.bits[name.partition(": ")[2]]
            for name, bits in found.bits.items()
            if name.partition(": ")[2] in found.bits
        },
    }


def main() -> None:
    """The command. It writes each row at once, and continues the file of an interrupted run."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("step", help="of lab.json; limits: those of the GPU")
    parser.add_argument("--variant", action="append", default=[], help="NAME=the path of _native")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write or continue")
    parser.add_argument("--rehearse", action="store_true", help="small workloads, on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    if options.step == "limits":
        options.out.write_text(json.dumps(limits(device)))
        return
    (step,) = (x for x in lab()["steps"] if x["name"] == options.step)
    modules = {name: Path(path) for name, path in (x.split("=", 1) for x in options.variant)}
    results: dict[str, Any] = {"peers": versions(PACKAGES), "rows": []}
    if options.out.exists():
        results = json.loads(options.out.read_text())
    measured = {f"{row['kind']} {row['workload']}" for row in results["rows"]}
    rows = REHEARSAL if options.rehearse else step["rows"]
    left = [row for row in rows if row not in measured]
    processes = processes_of(step, modules) if left else {}
    while left:
        row = row_of(workload_of(left.pop(0)), device, processes, step.get("calls", 1))
        results["rows"].append(row)
        results["not_measured"] = left
        # At once, or a kill could leave half a file.
        unfinished = options.out.with_suffix(".part")
        unfinished.write_text(by_row(results))
        unfinished.replace(options.out)
        print(row["kind"], row["workload"], row["seconds"], flush=True)
    for process in processes:
        process.end()
    print(f"{len(results['rows'])} workloads measured")
