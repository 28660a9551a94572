"""The GPU benchmark: every workload beside the GPU's limits and other libraries, in one run."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import (
    OURS_ON_GPUS,
    TO_BEAT_WITH_8_BITS,
    medians,
    ours_on_hopper,
    row_of,
    seconds,
)
from benchmarks.gpu.peers import PEERS
from benchmarks.workloads import Workload, of_trace, uniform
from examples.replay.models import MODELS

# Without a GPU the benchmark runs on the CPU, only to be tested.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def workloads(trace: Path | None, small: bool = False) -> Iterator[Workload]:
    """All workloads, or with `small` one for decode and one for prefill."""
    llama, big = MODELS["llama-3-8b"], MODELS["llama-3-70b"]
    if small:
        yield Workload("decode", "decode", llama, uniform(32, 1, 4096))
        yield Workload("prefill", "prefill", llama, uniform(1, 4096, 4096))
        return
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
    for name in ("llama-3-70b", "qwen3-8b", "gemma-3-12b", "gemma-2-9b", "gpt-oss-20b"):
        yield Workload(f"b32 x 8192, {name}", "decode", MODELS[name], uniform(32, 1, 8192))
    for cache_dtype in ("float8_e4m3fn", "int8"):
        for batch, context in ((1, 32768), (32, 8192)):
            name = f"b{batch} x {context}, {cache_dtype}"
            sequences = uniform(batch, 1, context)
            yield Workload(name, "decode", llama, sequences, cache_dtype=cache_dtype)
    if trace is not None:
        yield Workload(f"64 of {trace.stem}", "decode", llama, of_trace(trace, 64))
    for length in (1024, 4096, 8192, 16384, 32768):
        yield Workload(f"{length}", "prefill", llama, uniform(1, length, length))
    yield Workload("8192, llama-3-70b", "prefill", big, uniform(1, 8192, 8192))
    yield Workload("8192, gemma-2-9b", "prefill", MODELS["gemma-2-9b"], uniform(1, 8192, 8192))
    yield Workload("512 on 8192", "mixed", llama, uniform(1, 512, 8704))
    yield Workload(
        "512 on 8192 beside 32 decodes", "mixed", llama, ((512, 8704), *uniform(32, 1, 4096))
    )


def limits() -> dict[str, float]:
    """Bytes read, bytes copied and FLOP multiplied per second, for large tensors."""
    source = torch.randn(1 << 30 if DEVICE == "cuda" else 1 << 24, device=DEVICE)
    target = torch.empty_like(source)
    size = 8192 if DEVICE == "cuda" else 512
    left, right = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
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
    """The command. It writes each row at once, so that an interrupted run leaves its rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bench", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="one workload of each kind")
    parser.add_argument("--no-peers", action="store_true", help="this library alone")
    parser.add_argument("--no-hopper", action="store_true", help="not the kernel for Hopper")
    parser.add_argument("--seconds", type=float, default=300, help="start no workload after these")
    options = parser.parse_args()
    makers = OURS_ON_GPUS | TO_BEAT_WITH_8_BITS | ({} if options.no_peers else PEERS)
    if options.no_hopper:
        makers = {name: make for name, make in makers.items() if make is not ours_on_hopper}
    start = time.monotonic()
    results: dict[str, Any] = {"limits": limits(), "rows": [], "not_measured": []}
    for workload in workloads(options.trace, options.small):
        if time.monotonic() - start > options.seconds:
            results["not_measured"].append(workload.name)
            continue
        results["rows"].append(row_of(workload, DEVICE, makers))
        options.out.write_text(json.dumps(results, indent=2))
        print(workload.kind, workload.name, results["rows"][-1]["seconds"], flush=True)
    options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
