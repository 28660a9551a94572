"""Attention shapes of well-known models, from their published configuration files (config.json)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Model:
    """One attention layer of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None  # of its layers that have one
    soft_cap: float | None = None

    def attributes(self) -> dict[str, Any]:
        """The arguments of paged_attention that are not arrays."""
        return {
            "scale": self.head_size**-0.5,
            "sliding_window": self.sliding_window,
            "soft_cap": self.soft_cap,
        }

    def __str__(self) -> str:
        window = f", window {self.sliding_window}" if self.sliding_window else ""
        cap = f", soft cap {self.soft_cap:g}" if self.soft_cap else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads x {self.head_size}"
        return f"{self.name} ({heads}{window}{cap})"


MODELS = {
    model.name: model
    for model in (
        Model("tiny", 4, 2, 32),
        Model("llama-3-8b", 32, 8, 128),
        Model("llama-3-70b", 64, 8, 128),
        Model("qwen3-8b", 32, 8, 128),
        Model("mistral-7b", 32, 8, 128, sliding_window=4096),
        Model("phi-3-mini", 32, 32, 96, sliding_window=2047),
        Model("gemma-2-9b", 16, 8, 256, sliding_window=4096, soft_cap=50.0),
        Model("gemma-3-12b", 16, 8, 256, sliding_window=1024),
        Model("gpt-oss-20b", 64, 8, 64, sliding_window=128),  # without its attention sinks
    )
}
