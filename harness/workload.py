"""What is replayed: attention shapes of well-known models, from their published configuration files
(config.json), and traces: when requests arrive, and how many tokens they bring and ask for."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from xla_paged_attention.engine.scheduler import Arrival


@dataclass(frozen=True)
class Model:
    """One attention layer of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None  # of its layers that have one
    soft_cap: float | None = None
    value_head_size: int | None = None  # where V is a part of K

    @property
    def kv_numbers(self) -> int:
        """Numbers of K and V of a position in the cache."""
        rows = 2 if self.value_head_size is None else 1
        return rows * self.num_kv_heads * self.head_size

    def attributes(self) -> dict[str, Any]:
        """The arguments of paged_attention that are not arrays."""
        return {
            "scale": self.head_size**-0.5,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
        } | ({} if self.value_head_size is None else {"value_head_size": self.value_head_size})

    def __str__(self) -> str:
        window = f", window {self.sliding_window}" if self.sliding_window else ""
        cap = f", soft cap {self.soft_cap:g}" if self.soft_cap else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads x {self.head_size}"
        latent = f", latent, V {self.value_head_size}" if self.value_head_size else ""
        return f"{self.name} ({heads}{window}{cap}{latent})"


MODELS = {
    model.name: model
    for model in (
        Model("tiny", 4, 2, 32),
        Model("llama-2-7b", 32, 32, 128),
        Model("llama-3-8b", 32, 8, 128),
        Model("llama-3-70b", 64, 8, 128),
        Model("qwen3-8b", 32, 8, 128),
        Model("mistral-7b", 32, 8, 128, sliding_window=4096),
        Model("phi-3-mini", 32, 32, 96, sliding_window=2047),
        Model("gemma-2-9b", 16, 8, 256, sliding_window=4096, soft_cap=50.0),
        Model("gemma-3-12b", 16, 8, 256, sliding_window=1024),
        Model("gemma-4-31b", 32, 4, 512),  # its layers with full attention
        Model("gpt-oss-20b", 64, 8, 64, sliding_window=128),  # without its attention sinks
    )
}

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path) -> Iterator[Arrival]:
    """The rows of a CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens (the format
    of AzurePublicDataset's LLM inference traces).

    Raises:
        ValueError: there is no such file, or it has other columns.
    """
    if not path.is_file():
        raise ValueError(f"a trace must be a CSV file; got {path}, which is no file")
    with path.open(newline="") as file:
        began: datetime | None = None
        rows = csv.DictReader(file)
        if missing := [name for name in _COLUMNS if name not in (rows.fieldnames or ())]:
            raise ValueError(
                f"a trace must have the columns {', '.join(_COLUMNS)}; {path} has no "
                f"{', '.join(missing)}"
            )
        for row in rows:
            # Seven digits of a second in the file; Python takes six.
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            began = began or moment
            seconds = (moment - began).total_seconds()
            yield Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def generate_trace(count: int, seed: int = 0) -> Iterator[Arrival]:
    """A trace of the same shape as recorded chat traffic: Poisson arrivals, 5.5 a second, and
    heavy-tailed lengths, with medians of 1,020 prompt tokens and 129 generated ones."""
    rng = np.random.default_rng(seed)
    seconds = 0.0
    for _ in range(count):
        prompt = int(np.clip(rng.lognormal(np.log(1020), 1.0), 1, 14_050))
        generated = int(np.clip(rng.lognormal(np.log(129), 0.9), 1, 1_000))
        yield Arrival(seconds, prompt, generated)
        seconds += rng.exponential(1 / 5.5)
