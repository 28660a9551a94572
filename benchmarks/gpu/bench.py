"""The GPU benchmark: every workload beside the GPU's limits and other libraries, in one run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import (
    OURS_ON_GPUS,
    TO_BEAT_WITH_8_BITS,
    medians,
    row_of,
    seconds,
)
from benchmarks.gpu.peers import PACKAGES, PEERS
from benchmarks.machine import versions
from benchmarks.workloads import Workload, trace_sequences, uniform
from harness.workload import MODELS, Model


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
    for length in (1024, 4096, 8192, 16384, 32768):
        yield Workload(f"{length}", "prefill", llama, uniform(1, length, length))
    yield Workload("8192, llama-3-70b", "prefill", big, uniform(1, 8192, 8192))
    for name in ("gemma-2-9b", "gemma-4-31b"):
        yield Workload(f"8192, {name}", "prefill", MODELS[name], uniform(1, 8192, 8192))
    yield Workload("512 on 8192", "mixed", llama, uniform(1, 512, 8704))
    yield Workload(
        "512 on 8192 beside 32 decodes", "mixed", llama, ((512, 8704), *uniform(32, 1, 4096))
    )


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


def main() -> None:
    """The command. It writes each row at once, and continues the file of an interrupted run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bench", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write or continue")
    parser.add_argument("--rehearse", action="store_true", help="small workloads, on the CPU")
    parser.add_argument("--seconds", type=float, default=300, help="start no workload after these")
    options = parser.parse_args()
    start, device = time.monotonic(), "cpu" if options.rehearse else "cuda"
    makers = OURS_ON_GPUS | TO_BEAT_WITH_8_BITS | PEERS
    wanted = list(rehearsal() if options.rehearse else workloads(options.trace))
    results: dict[str, Any] = {"ours": [*OURS_ON_GPUS], "peers": versions(PACKAGES), "rows": []}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        # Rows without a library that is there now are measured once more.
        results["rows"] = before["rows"] if before["peers"] == results["peers"] else []
    results["limits"] = limits(device)
    measured = {(row["kind"], row["workload"]) for row in results["rows"]}
    left = [each for each in wanted if (each.kind, each.name) not in measured]
    while left and time.monotonic() - start < options.seconds:
        workload = left.pop(0)
        row = row_of(workload, device, makers)
        if device == "cuda":
            torch.cuda.empty_cache()
        results["rows"].append(row)
        results["not_measured"] = [each.name for each in left]
        # At once, or a kill could leave half a file.
        unfinished = options.out.with_suffix(".part")
        unfinished.write_text(json.dumps(results, indent=2))
        unfinished.replace(options.out)
        print(workload.kind, workload.name, row["seconds"], flush=True)
    print(f"{len(results['rows'])} workloads measured, {len(left)} left")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
