"""A contest on the GPU: workloads beside the GPU's limits, other builds and other libraries.

A step of lab.json says which rows there are and who takes part, in which process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import Prepared, described, medians, seconds
from benchmarks.gpu.peers import PACKAGES
from benchmarks.gpu.process import MAKERS, Process
from benchmarks.machine import versions
from benchmarks.workloads import Workload, trace_sequences, uniform
from harness.workload import MODELS, Model

LAB = Path(__file__).with_name("lab.json")


def workloads(trace: Path | None) -> Iterator[Workload]:
    """All workloads: decode and prefill by turns, so that an interrupted run has some of each."""
    kinds = (_decode(trace), _prefill())
    return (each for pair in zip_longest(*kinds) for each in pair if each is not None)


def rehearsal() -> Iterator[Workload]:
    """Small workloads for a machine without a GPU."""
    model = Model("small", 8, 2, 64)
    yield Workload("b2 x 256", "decode", model, uniform(2, 1, 256))
    yield Workload("256", "prefill", model, uniform(1, 256, 256))


def _decode(trace: Path | None) -> Iterator[Workload]:
    llama = MODELS["llama-3-8b"]
    for batch, context in [
        (1, 1024), (1, 8192), (1, 32768), (1, 131072),
        (8, 1024), (8, 8192), (8, 32768),
        (32, 1024), (32, 8192),
        (128, 1024), (128, 8192),
    ]:  # fmt: skip
        yield Workload(f"b{batch} x {context}", "decode", llama, uniform(batch, 1, context))
    for block_size in (1, 64, 128):
        yield Workload(
            f"b32 x 8192, blocks of {block_size}",
            "decode",
            llama,
            uniform(32, 1, 8192),
            block_size,
        )
    for name in (
        "llama-3-70b", "qwen3-8b", "gemma-3-12b", "gemma-4-31b", "gemma-2-9b", "gpt-oss-20b",
    ):  # fmt: skip
        yield Workload(f"b32 x 8192, {name}", "decode", MODELS[name], uniform(32, 1, 8192))
    for cache_dtype in ("float8_e4m3fn", "int8"):
        for batch, context in ((1, 32768), (32, 8192)):
            name = f"b{batch} x {context}, {cache_dtype}"
            sequences = uniform(batch, 1, context)
            yield Workload(name, "decode", llama, sequences, cache_dtype=cache_dtype)
    if trace is not None:
        yield Workload(f"64 of {trace.stem}", "decode", llama, trace_sequences(trace, 64))


def _prefill() -> Iterator[Workload]:
    llama, big = MODELS["llama-3-8b"], MODELS["llama-3-70b"]
    for length in (1024, 2048, 4096, 8192, 16384, 32768):
        yield Workload(f"{length}", "prefill", llama, uniform(1, length, length))
    yield Workload("8192, llama-3-70b", "prefill", big, uniform(1, 8192, 8192))
    for name in ("mistral-7b", "gemma-2-9b", "gemma-4-31b"):
        yield Workload(f"8192, {name}", "prefill", MODELS[name], uniform(1, 8192, 8192))
    yield Workload("512 on 8192", "mixed", llama, uniform(1, 512, 8704))
    yield Workload(
        "512 on 8192 beside 32 decodes", "mixed", llama, ((512, 8704), *uniform(32, 1, 4096))
    )


def title(workload: Workload) -> str:
    """The name of a workload among those of all kinds."""
    return f"{workload.kind} {workload.name}"


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
            each variant, any other name is one of `environments`.
        modules: the path of each variant's module; "" is the module in use, if it has one.
    """
    found = {}
    for name, patterns in step.get("contestants", {"": ["*"]}).items():
        environment = step.get("environments", {}).get(name)
        for process in [x for x in modules if x] if name == "*" else [name]:
            module = modules.get(process) or modules.get("")
            found[Process(process, module, environment)] = chosen(MAKERS, patterns)
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
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write or continue")
    parser.add_argument("--rehearse", action="store_true", help="small workloads, on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    if options.step == "limits":
        options.out.write_text(json.dumps(limits(device)))
        return
    (step,) = (x for x in json.loads(LAB.read_text())["steps"] if x["name"] == options.step)
    rows = list(rehearsal() if options.rehearse else workloads(options.trace))
    named = {title(each): each for each in rows}
    wanted = chosen(named, ["*"] if options.rehearse else step.get("rows", ["*"]))
    modules = {name: Path(path) for name, path in (x.split("=", 1) for x in options.variant)}
    results: dict[str, Any] = {"peers": versions(PACKAGES), "rows": []}
    if options.out.exists():
        results = json.loads(options.out.read_text())
    measured = {f"{row['kind']} {row['workload']}" for row in results["rows"]}
    left = [name for name in wanted if name not in measured]
    processes = processes_of(step, modules) if left else {}
    while left:
        row = row_of(named[left.pop(0)], device, processes, step.get("calls", 1))
        results["rows"].append(row)
        results["not_measured"] = left
        # At once, or a kill could leave half a file.
        unfinished = options.out.with_suffix(".part")
        unfinished.write_text(json.dumps(results, indent=1))
        unfinished.replace(options.out)
        print(row["kind"], row["workload"], row["seconds"], flush=True)
    for process in processes:
        process.end()
    print(f"{len(results['rows'])} workloads measured")
