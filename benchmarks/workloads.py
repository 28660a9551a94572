"""Workloads of attention: their tensors, the bytes they read and the FLOP they compute."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.workload import Model

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
# Its latent attention after the absorption.
DEEPSEEK = Model("deepseek-v3", 128, 1, 576, value_head_size=512)
SCALE = 1 / 32  # of an 8-bit cache, so that the stored numbers are about 32


@dataclass(frozen=True)
class Workload:
    """Sequences of one step: pairs (query tokens, context)."""

    name: str
    kind: str  # "decode", "prefill" or "mixed"
    model: Model
    sequences: tuple[tuple[int, int], ...]
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # an 8-bit dtype, with one scale for the whole cache
    max_seqs: int = 0  # rows of the metadata, at least as many as sequences
    max_blocks_per_seq: int = 0  # columns of the tables, at least as many as needed
    shared_blocks: int = 0  # that the tables of all sequences begin with

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K and V that are attended to, each read once: also what is shared."""
        positions = shared = 0
        for q_len, context in self.sequences:
            first = context - self._attended(q_len, context)
            begin = min(context, max(first, self.shared_blocks * self.block_size))
            positions += context - begin
            shared = max(shared, begin - first)
        positions += shared
        itemsize = DTYPES[self.cache_dtype or self.dtype].itemsize
        return positions * self.model.kv_numbers * itemsize

    @property
    def flops(self) -> int:
        """FLOP of the two products, without what the mask leaves out."""
        pairs = 0
        for q_len, context in self.sequences:
            last = np.arange(context - q_len + 1, context + 1, dtype=np.int64)
            window = self.model.sliding_window or context
            pairs += int(np.minimum(last, window).sum())
        columns = self.model.value_head_size or self.model.head_size
        return 2 * pairs * self.model.num_heads * (self.model.head_size + columns)

    def _attended(self, q_len: int, context: int) -> int:
        window = self.model.sliding_window
        return context if window is None else min(context, window + q_len - 1)

    def attributes(self, device: str | torch.device) -> dict[str, Any]:
        """The keyword arguments of paged_attention."""
        attributes = self.model.attributes()
        if self.cache_dtype is not None:
            attributes["k_scale"] = torch.tensor(SCALE, device=device)
            if self.model.value_head_size is None:
                attributes["v_scale"] = attributes["k_scale"]
        return attributes

    def operands(self, device: str, seed: int = 0) -> list[torch.Tensor]:
        """The operands of paged_attention, with blocks scattered over a pool a quarter larger."""
        generator = torch.Generator(device).manual_seed(seed)
        rng = np.random.default_rng(seed)
        model, num_seqs = self.model, len(self.sequences)
        max_seqs = max(self.max_seqs, num_seqs)
        blocks = [-(-context // self.block_size) for _, context in self.sequences]
        pool = rng.permutation(sum(blocks) * 5 // 4 + 1).astype(np.int32)
        tables = np.full((max_seqs, max(self.max_blocks_per_seq, *blocks)), 2**30, np.int32)
        taken = 0
        for s, count in enumerate(blocks):
            tables[s, :count] = pool[taken : taken + count]
            taken += count
        tables[:num_seqs, : self.shared_blocks] = tables[0, : self.shared_blocks]
        starts, contexts = np.zeros(max_seqs + 1, np.int32), np.zeros(max_seqs, np.int32)
        starts[1 : num_seqs + 1] = np.cumsum([q_len for q_len, _ in self.sequences])
        starts[num_seqs + 1 :] = starts[num_seqs]
        contexts[:num_seqs] = [context for _, context in self.sequences]

        def random(*shape: int) -> torch.Tensor:
            dtype = DTYPES[self.dtype]
            return torch.randn(shape, device=device, dtype=dtype, generator=generator)

        rows = (2 * model.num_kv_heads,) if model.value_head_size is None else ()
        cache = random(len(pool), self.block_size, *rows, model.head_size)
        if self.cache_dtype is not None:
            cache = (cache / SCALE).clamp(-127, 127).to(DTYPES[self.cache_dtype])

        def integers(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return [
            random(int(starts[-1]), model.num_heads, model.head_size),
            cache,
            integers(contexts),
            integers(tables),
            integers(starts),
            integers([num_seqs]),
        ]


def uniform(batch: int, q_len: int, context: int) -> tuple[tuple[int, int], ...]:
    """`batch` equal sequences."""
    return ((q_len, context),) * batch


def trace_sequences(trace: Path, batch: int) -> tuple[tuple[int, int], ...]:
    """Decode of the first `batch` requests of a trace, each halfway through its answer."""
    with trace.open() as file:
        rows = list(csv.DictReader(file))[:batch]
    lengths = [int(r["ContextTokens"]) + int(r["GeneratedTokens"]) // 2 for r in rows]
    return tuple((1, length) for length in lengths)
