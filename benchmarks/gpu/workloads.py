"""The workloads, as tensors on the GPU, and what they must move and multiply."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.replay.models import MODELS, Model

BF16 = torch.bfloat16

# The CPU where there is no GPU: it measures nothing of interest, but the benchmark is tested there.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Workload:
    """Sequences of one step: pairs (query tokens, context)."""

    name: str
    kind: str  # "decode", "prefill" or "mixed"
    model: Model
    sequences: tuple[tuple[int, int], ...]
    block_size: int = 16

    @property
    def kv_bytes(self) -> int:
        """K and V that are attended to, each read once."""
        positions = sum(self._attended(q_len, context) for q_len, context in self.sequences)
        return positions * 2 * self.model.num_kv_heads * self.model.head_size * 2

    @property
    def flops(self) -> int:
        """Of the two products, without what the mask leaves out."""
        pairs = 0
        for q_len, context in self.sequences:
            last = np.arange(context - q_len + 1, context + 1, dtype=np.int64)
            window = self.model.sliding_window or context
            pairs += int(np.minimum(last, window).sum())
        return 4 * pairs * self.model.num_heads * self.model.head_size

    def _attended(self, q_len: int, context: int) -> int:
        window = self.model.sliding_window
        return context if window is None else min(context, window + q_len - 1)

    def operands(self, seed: int = 0) -> list[torch.Tensor]:
        """The operands of paged_attention; blocks are scattered over a pool a quarter larger."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        rng = np.random.default_rng(seed)
        blocks = [-(-context // self.block_size) for _, context in self.sequences]
        pool = rng.permutation(sum(blocks) * 5 // 4 + 1).astype(np.int32)
        tables = np.full((len(blocks), max(blocks)), 2**30, np.int32)
        taken = 0
        for s, count in enumerate(blocks):
            tables[s, :count] = pool[taken : taken + count]
            taken += count
        model = self.model
        q_lens = [q_len for q_len, _ in self.sequences]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE, dtype=BF16, generator=generator)

        def integers(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        return [
            random(sum(q_lens), model.num_heads, model.head_size),
            random(len(pool), self.block_size, 2 * model.num_kv_heads, model.head_size),
            integers([context for _, context in self.sequences]),
            torch.from_numpy(tables).to(DEVICE),
            integers(np.cumsum([0, *q_lens])),
            integers([len(self.sequences)]),
        ]


def uniform(batch: int, q_len: int, context: int) -> tuple[tuple[int, int], ...]:
    """`batch` sequences alike."""
    return ((q_len, context),) * batch


def of_trace(trace: Path, batch: int) -> tuple[tuple[int, int], ...]:
    """Decode steps of the first requests of a trace, each halfway through its answer."""
    with trace.open() as file:
        rows = list(csv.DictReader(file))[:batch]
    lengths = [int(r["ContextTokens"]) + int(r["GeneratedTokens"]) // 2 for r in rows]
    return tuple((1, length) for length in lengths)


def workloads(trace: Path | None, small: bool = False) -> Iterator[Workload]:
    """All of them, or with `small` one of each kind."""
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
