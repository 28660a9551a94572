"""Times every workload: right first, then beside the limits and the peers, all in one run.

Contestants take turns, round after round; a time is the median over rounds of the mean over calls
that are queued one after the other, so what the host does overlaps what the GPU does, as it does
for a user.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.peers import OURS, PEERS, DoesNotApply
from benchmarks.gpu.workloads import DEVICE, Workload, workloads

Contestants = dict[str, Callable[[], Any]]


def wait_for(result: Any) -> None:
    """Until the GPU is done with everything."""
    if hasattr(result, "block_until_ready"):
        result.block_until_ready()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(contestants: Contestants, rounds: int = 7, budget: float = 0.05) -> dict[str, float]:
    """The median time of a call of each contestant."""
    calls = {}
    for name, call in contestants.items():
        for _ in range(3):
            wait_for(call())
        start = time.perf_counter()
        wait_for(call())
        calls[name] = max(1, min(1000, int(budget / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                result = call()
            wait_for(result)
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


def limits() -> dict[str, float]:
    """What the GPU reads, copies and multiplies per second, of plain large tensors."""
    source = torch.randn(1 << 30 if DEVICE == "cuda" else 1 << 24, device=DEVICE)
    target = torch.empty_like(source)
    size = 8192 if DEVICE == "cuda" else 512
    left, right = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times = seconds(
        {
            "sum": source.sum,
            "max": source.max,
            "copy": lambda: target.copy_(source),
            "matmul": lambda: left @ right,
        }
    )
    num_bytes = source.numel() * 4
    return {
        "read_bytes_per_s": num_bytes / min(times["sum"], times["max"]),
        "copy_bytes_per_s": 2 * num_bytes / times["copy"],
        "matmul_flops_per_s": 2 * size**3 / times["matmul"],
    }


def error_of(result: Any, workload: Workload, operands: list[torch.Tensor]) -> float:
    """The largest error of a sample of rows against float64, as a share of what rounding allows."""
    result = (
        torch.utils.dlpack.from_dlpack(result) if not isinstance(result, torch.Tensor) else result
    )
    query, cache, _, tables, starts, _ = operands
    model, worst = workload.model, 0.0
    for s in {0, len(workload.sequences) // 2, len(workload.sequences) - 1}:
        q_len, context = workload.sequences[s]
        blocks = tables[s, : -(-context // workload.block_size)].long()
        kv = cache[blocks].flatten(0, 1)[:context]
        for i in {0, q_len // 2, q_len - 1}:
            position = context - q_len + i
            first = max(0, position - model.sliding_window + 1) if model.sliding_window else 0
            attended = kv[first : position + 1].double()
            group = model.num_heads // model.num_kv_heads
            key = attended[:, 0::2].repeat_interleave(group, 1)
            value = attended[:, 1::2].repeat_interleave(group, 1)
            row = int(starts[s]) + i
            logits = (
                torch.einsum("hd,jhd->hj", query[row].double(), key) * model.attributes()["scale"]
            )
            if model.soft_cap:
                logits = model.soft_cap * torch.tanh(logits / model.soft_cap)
            weights = torch.softmax(logits, -1)
            expected = torch.einsum("hj,jhd->hd", weights, value)
            sizes = torch.einsum("hj,jhd->hd", weights, value.abs())
            allowed = 1e-4 + (expected.abs() + sizes) * 2**-8
            error = (result[row].double() - expected).abs() / allowed
            worst = max(worst, float(error.nan_to_num(float("inf")).max()))
    return worst


def row_of(workload: Workload, with_peers: bool) -> dict[str, Any]:
    """What came of a workload: times, errors, and who did not take part and why."""
    operands = workload.operands()
    contestants: Contestants = {}
    errors: dict[str, float] = {}
    absent: dict[str, str] = {}
    for name, make in (OURS | PEERS if with_peers else OURS).items():
        try:
            call = make(workload, operands)
            errors[name] = error_of(call(), workload, operands)
        except DoesNotApply as reason:
            absent[name] = f"does not compute {reason}"
        except Exception as error:  # whatever a library throws is what the table says of it
            absent[name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        else:
            if errors[name] <= 1:
                contestants[name] = call
            else:
                absent[name] = f"wrong: {errors[name]:.3g} times the allowed error"
    row = {
        "workload": workload.name,
        "kind": workload.kind,
        "model": str(workload.model),
        "kv_bytes": workload.kv_bytes,
        "flops": workload.flops,
        "seconds": seconds(contestants),
        "errors": errors,
        "absent": absent,
    }
    del operands, contestants
    torch.cuda.empty_cache()
    return row


def main() -> None:
    """Writes the rows as they come, so that a run that is cut off leaves what it measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bench", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--small", action="store_true", help="one workload of each kind")
    parser.add_argument("--no-peers", action="store_true", help="this library alone")
    parser.add_argument("--seconds", type=float, default=300, help="start no workload after these")
    options = parser.parse_args()
    start = time.monotonic()
    results: dict[str, Any] = {"limits": limits(), "rows": [], "not_measured": []}
    for workload in workloads(options.trace, options.small):
        if time.monotonic() - start > options.seconds:
            results["not_measured"].append(workload.name)
            continue
        results["rows"].append(row_of(workload, not options.no_peers))
        options.out.write_text(json.dumps(results, indent=2))
        print(workload.kind, workload.name, results["rows"][-1]["seconds"], flush=True)
    options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
