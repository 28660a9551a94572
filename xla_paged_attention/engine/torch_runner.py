"""Runs the model's steps in PyTorch, eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shared_ffi.batch import Batch
from xla_paged_attention.engine.llama_torch import Llama
from xla_paged_attention.engine.model import Config, Model
from xla_paged_attention.engine.runner import ModelRunner
from xla_paged_attention.engine.scheduler import Limits


class TorchRunner(ModelRunner):
    """PyTorch, eager or by torch.compile.

    Args:
        model: sizes and weights.
        limits: sizes of a step and of the pool.
        device: where the model runs, such as ``cpu``, ``cuda`` or ``xla``.
        compiler: a backend of torch.compile, such as ``inductor``; None: eager.
        new_model: makes the module of sizes and weights.

    Attributes:
        model: a ``Llama``. Its weights may be written in place between two steps.
        caches: one for each layer, ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``, in
            the weights' dtype.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        *,
        device: str = "cpu",
        compiler: str | None = None,
        new_model: Callable[[Config, Mapping[str, torch.Tensor]], Llama] = Llama,
    ) -> None:
        weights = {name: torch.as_tensor(weight) for name, weight in model.weights.items()}
        self._device = device
        self.model = new_model(model.config, weights).to(device)
        self.caches = self.model.new_caches(limits.num_blocks, limits.block_size)
        self._forward: Callable[..., torch.Tensor] = self.model
        if compiler:
            self._forward = torch.compile(
                self.model, backend=compiler, fullgraph=True, dynamic=False
            )
        self._graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @torch.no_grad()
    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        return self._forward(self.caches, self.place(batch)).cpu().numpy()

    def weights(self) -> list[tuple[Any, int]]:
        """As in ModelRunner."""
        return [(weight, weight._version) for weight in self.model.parameters()]

    def compiles(self) -> int:
        """As in ModelRunner."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"] - self._graphs_before)

    def place(self, batch: Batch) -> Batch:
        """A step's NumPy arrays as tensors on the model's device."""
        return Batch(*(torch.from_numpy(array).to(self._device) for array in batch))
