"""A PyTorch layer that updates its cache and attends to it."""

from __future__ import annotations

from typing import Any

import torch

import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from harness.arrays import to_torch
from tests.cases.sound_calls import attention, split

OPS = torch.ops.xla_gpu


def tensors(arguments: dict[str, Any]) -> list[torch.Tensor]:
    return [to_torch(array) for array in split(arguments)[0]]


class Layer(torch.nn.Module):
    """One attention layer with its cache, for export."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2, 4, 8))

    def forward(
        self, key: torch.Tensor, slots: torch.Tensor, query: torch.Tensor, *metadata: torch.Tensor
    ) -> torch.Tensor:
        OPS.kv_cache_update(self.cache, key, key * 2, slots)
        return OPS.paged_attention(query, self.cache, *metadata, 0.5)


def layer_inputs() -> tuple[torch.Tensor, ...]:
    query, _, *metadata = tensors(attention())
    slots = torch.tensor([6, 7, 2, 0], dtype=torch.int64)
    return (torch.randn(4, 2, 8), slots, torch.randn_like(query), *metadata)
