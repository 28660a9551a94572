"""``make bench``: microseconds per call and GB/s of every backend on the CPU.

Each workload is checked against the float64 oracle, and the backends against each other, before it
is timed. Contestants take turns, so that a change in the machine's speed affects all of them. A
time is the median over these rounds. Compare ratios, not absolute times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_xla
from rich.console import Console
from rich.table import Table

import jax_frontend
import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from benchmarks.contest import medians, take_turns
from benchmarks.kept import by_row
from benchmarks.workloads import Workload, uniform
from harness import reference
from harness.compare import assert_close, assert_same_bits
from harness.workload import MODELS, Model
from tools import machine

I32 = np.int32
Timings = dict[str, float]


def call_microseconds(
    contestants: dict[str, Callable[[], Any]], rounds: int, calls: int
) -> Timings:
    """The median time of a call of each contestant."""
    for call in contestants.values():
        call()  # compiles
    times = take_turns(contestants, rounds, dict.fromkeys(contestants, calls))
    return {name: seconds * 1e6 for name, seconds in medians(times).items()}


def decode_step(
    batch: int, context: int, model: Model = MODELS["llama-3-8b"], block_size: int = 16
) -> list[torch.Tensor]:
    """Operands of a decode step: `batch` sequences with one query token each."""
    sequences = uniform(batch, 1, context)
    return Workload("", "decode", model, sequences, block_size, "float32").operands("cpu")


def call_overheads(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a tiny call through each backend, beside the framework's own cheapest op."""
    # So small that a call costs only the way to the kernel and back.
    on_cpu = decode_step(1, 1, Model("tiny", 1, 1, 8), block_size=4)
    attend = torch.ops.xla_gpu.paged_attention
    ones = torch.ones(4)
    with torch.inference_mode():
        eager = call_microseconds(
            {"paged_attention": lambda: attend(*on_cpu, 0.3), "aten.add": lambda: ones + ones},
            rounds,
            500,
        )

    arrays = [jnp.asarray(x.numpy()) for x in on_cpu]
    jitted = jax.jit(partial(jax_frontend.paged_attention, scale=0.3))
    add = jax.jit(jax_frontend.simple_add)
    increment = jax.jit(lambda x: x + 1)
    six = jax.jit(lambda a, b, c, d, e, f: a + b[0, 0, 0, 0] + c[0] + d[0, 0] + e[0] + f[0])
    x = jnp.ones(4)
    in_jax = call_microseconds(
        {
            "paged_attention": lambda: jitted(*arrays),
            "simple_add": lambda: add(x, x),
            "x + 1": lambda: increment(x),
            "the same six operands added": lambda: six(*arrays),
        },
        rounds,
        500,
    )

    device = torch_xla.device()
    on_xla = [tensor.to(device) for tensor in on_cpu]
    ones_on_xla = ones.to(device)
    torch_xla.sync(wait=True)
    with torch.no_grad():  # only traces: the graphs never run
        lazy = call_microseconds(
            {
                "paged_attention": lambda: attend(*on_xla, 0.3),
                "aten.add": lambda: ones_on_xla + ones_on_xla,
            },
            rounds,
            200,
        )
    return {"torch eager": eager, "JAX jit": in_jax, "torch_xla tracing": lazy}


def layer_calls(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of what a layer of SmolLM2 does around attention to 8 tokens, in eager PyTorch:
    with the rotary embedding in PyTorch's operators, and in the update of the cache."""
    return [_layer_calls(context, rounds) for context in (8, 512)]


def _layer_calls(context: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    num_tokens, num_heads, num_kv_heads, head_size, block_size = 8, 9, 3, 64, 16
    width = -(-context // block_size)
    tables = torch.from_numpy(rng.permutation(num_tokens * width).astype(I32)).view(-1, width)
    caches = [torch.zeros(num_tokens * width, block_size, 2 * num_kv_heads, head_size)] * 2
    caches[1] = caches[1].clone()
    metadata = [torch.full((num_tokens,), context, dtype=torch.int32), tables]
    metadata += [torch.arange(num_tokens + 1).int(), torch.tensor([num_tokens]).int()]
    positions = torch.full((num_tokens,), context - 1)
    slots = tables[:, -1] * block_size + (context - 1) % block_size
    angles = torch.arange(1024)[:, None] / 10000 ** (torch.arange(0, head_size, 2) / head_size)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    # transformers makes these once for all layers.
    cos, sin = (x[positions].repeat(1, 2)[:, None] for x in table.chunk(2, -1))
    shapes = [(num_tokens, n, head_size) for n in (num_heads, num_kv_heads, num_kv_heads)]
    query, key, value = (torch.from_numpy(rng.standard_normal(x, np.float32)) for x in shapes)
    rotated = query.clone()
    ops = torch.ops.xla_gpu

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def four_calls() -> Any:
        ops.kv_cache_update(caches[0], rotate(key), value, slots)
        return ops.paged_attention(rotate(query), caches[0], *metadata, head_size**-0.5)

    def two_calls() -> Any:  # rotates the same query again and again
        ops.kv_cache_update(
            *(caches[1], key, value, slots),
            query=rotated,
            positions=positions,
            cos_sin_cache=table,
        )
        return ops.paged_attention(rotated, caches[1], *metadata, head_size**-0.5)

    with torch.inference_mode():
        results = [_as_numpy(call()) for call in (four_calls, two_calls)]
        assert_same_bits(results[1], results[0])
        assert torch.equal(*caches)
        contestants = {"four": four_calls, "two": two_calls}
        times = take_turns(contestants, rounds, dict.fromkeys(contestants, 300))
    ratios = [two / four for four, two in zip(times["four"], times["two"], strict=True)]
    us = {name: seconds * 1e6 for name, seconds in medians(times).items()}
    return {"context": context, **us, "ratio": statistics.median(ratios)}


def decode_rates(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of decode steps through every backend, and the rate of reading K and V."""
    rows = []
    for batch, context in [(1, 512), (1, 4096), (16, 1024)]:
        operands = decode_step(batch, context)
        contestants, results = _contestants(operands)
        expected = partial(reference.paged_attention, scale=0.088)
        oracle = expected(*(x.numpy() for x in operands))
        for result in results.values():
            assert_close(result, oracle, "float32")
            assert_same_bits(result, results["torch eager"])
        gigabytes = 2 * batch * context * 8 * 128 * 4 / 1e9
        for backend, microseconds in call_microseconds(contestants, rounds, 3).items():
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "backend": backend,
                    "us": microseconds,
                    "GB/s": gigabytes / (microseconds * 1e-6),
                }
            )
    return rows


def calls_beside_others(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of a decode step on two threads, beside processes that compute all the time."""
    contestants, _ = _contestants(decode_step(8, 512))
    chosen = {name: contestants[name] for name in ("torch eager", "JAX jit")}
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    rows, others = [], []
    try:
        for num_others in range(3):
            # A rest: the threads of PyTorch's operators spin for a while.
            calls = take_turns(chosen, 10 * rounds, dict.fromkeys(chosen, 1), rest=0.005)
            for backend, times in calls.items():
                *_, p90 = statistics.quantiles(times, n=10)
                us = {"us": statistics.median(times) * 1e6, "p90_us": p90 * 1e6}
                rows.append({"others": num_others, "backend": backend, **us})
            others.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    finally:
        torch.set_num_threads(threads)
        for process in others:
            process.kill()
    return rows


def _contestants(
    on_cpu: list[torch.Tensor],
) -> tuple[dict[str, Callable[[], Any]], dict[str, np.ndarray]]:
    attend = torch.ops.xla_gpu.paged_attention
    arrays = [jnp.asarray(x.numpy()) for x in on_cpu]
    on_xla = [tensor.to(torch_xla.device()) for tensor in on_cpu]
    torch_xla.sync(wait=True)
    jitted = jax.jit(partial(jax_frontend.paged_attention, scale=0.088))
    compiled = torch.compile(lambda *a: attend(*a, 0.088), backend="openxla", fullgraph=True)

    def lazily() -> torch.Tensor:
        result: torch.Tensor = attend(*on_xla, 0.088)
        torch_xla.sync(wait=True)
        return result

    def with_openxla() -> torch.Tensor:
        result: torch.Tensor = compiled(*on_xla)
        torch_xla.sync(wait=True)
        return result

    contestants: dict[str, Callable[[], Any]] = {
        "torch eager": lambda: attend(*on_cpu, 0.088),
        "JAX jit": lambda: jitted(*arrays).block_until_ready(),
        "torch_xla lazy": lazily,
        "torch_xla openxla": with_openxla,
    }
    results = {backend: _as_numpy(call()) for backend, call in contestants.items()}
    return contestants, results


def _as_numpy(result: Any) -> np.ndarray:
    return result.cpu().numpy() if isinstance(result, torch.Tensor) else np.asarray(result)


def read_bandwidth(rounds: int) -> float:
    """GB/s of summing 512 MiB with all of torch's threads: the limit of a decode step."""
    data = torch.ones(1 << 27)
    return (
        0.512 * 1.048576 / (call_microseconds({"sum": lambda: data.sum()}, rounds, 1)["sum"] * 1e-6)
    )


def report(console: Console, results: dict[str, Any]) -> None:
    """Prints the tables."""
    table = Table(title="A tiny call: the way to the kernel and back")
    for column in ("backend", "call", "us per call"):
        table.add_column(column, justify="right" if column == "us per call" else "left")
    for backend, timings in results["call_overhead_us"].items():
        for name, microseconds in timings.items():
            table.add_row(backend, name, f"{microseconds:.1f}")
        table.add_section()
    console.print(table)

    table = Table(title="A layer of SmolLM2, 8 tokens, torch eager: rotate, update, attend")
    for column in ("context", "us, rotated by PyTorch", "us, rotated by the update", "ratio"):
        table.add_column(column, justify="right")
    for row in results["layer_calls"]:
        four, two = (f"{row[name]:.1f}" for name in ("four", "two"))
        table.add_row(str(row["context"]), four, two, f"{row['ratio']:.2f}")
    console.print(table)

    table = Table(title="Decode, 8 x 512, float32, two threads, beside busy processes")
    for column in ("processes", "backend", "median us", "90th percentile"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for row in results["beside_others"]:
        times = (f"{row[name]:.0f}" for name in ("us", "p90_us"))
        table.add_row(str(row["others"]), row["backend"], *times)
    console.print(table)

    limit = results["read_gb_per_s"]
    table = Table(title=f"Decode, 32/8 heads x 128, float32 (the machine reads {limit:.1f} GB/s)")
    for column in ("batch", "context", "backend", "us per call", "GB/s", "of read bandwidth"):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for row in results["decode"]:
        share = f"{row['GB/s'] / limit:.0%}"
        us, rate = f"{row['us']:.0f}", f"{row['GB/s']:.2f}"
        table.add_row(str(row["batch"]), str(row["context"]), row["backend"], us, rate, share)
    console.print(table)


def main() -> None:
    """Times every backend on this machine's CPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns that each contestant takes")
    parser.add_argument("--out", type=Path, help="also write the results to this file, as JSON")
    options = parser.parse_args()
    results = {
        "machine": machine.cpu(),
        "versions": machine.versions(("xla-paged-attention", "jax", "torch", "torch_xla")),
        "call_overhead_us": call_overheads(options.rounds),
        "layer_calls": layer_calls(options.rounds),
        "read_gb_per_s": read_bandwidth(options.rounds),
        "decode": decode_rates(options.rounds),
        "beside_others": calls_beside_others(options.rounds),
    }
    report(Console(), results)
    if options.out:
        options.out.write_text(by_row(results))


if __name__ == "__main__":
    main()
