"""The runners of the engine by their names, and those of torch_xla's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_xla

from harness import hlo
from shared_ffi.batch import Batch
from xla_paged_attention.engine.jax_runner import JaxRunner
from xla_paged_attention.engine.llama_torch import Llama
from xla_paged_attention.engine.model import Config, Model
from xla_paged_attention.engine.runner import ModelRunner
from xla_paged_attention.engine.scheduler import Limits
from xla_paged_attention.engine.torch_runner import TorchRunner


class TorchXlaRunner(TorchRunner):
    """torch_xla's lazy mode, one graph a step."""

    def __init__(self, model: Model, limits: Limits, **options: Any) -> None:
        super().__init__(model, limits, device="xla", **options)
        torch_xla.sync(wait=True)
        self._compiles_before = hlo.torch_xla_compiles()

    @torch.no_grad()
    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        logits = self._forward(self.caches, self.place(batch))
        torch_xla.sync()
        return logits.cpu().numpy()

    def compiles(self) -> int:
        """As in ModelRunner."""
        return hlo.torch_xla_compiles() - self._compiles_before

    @torch.no_grad()
    def hlo(self, batch: Batch) -> str:
        """As in ModelRunner."""
        caches = [cache.clone() for cache in self.caches]
        logits = self.model(caches, self.place(batch))
        return hlo.from_torch_xla([*caches, logits])


def _vllm_model(config: Config, weights: Mapping[str, torch.Tensor]) -> Llama:
    """A model with vLLM's attention layers."""
    try:
        from examples.generate.llama_vllm import VllmLlama  # noqa: PLC0415  (needs vLLM)
    except ImportError as error:
        raise ValueError(str(error)) from error
    return VllmLlama(config, weights)


RUNNERS: dict[str, Callable[[Model, Limits], ModelRunner]] = {
    "jax": JaxRunner,
    "torch": TorchRunner,
    "torch_xla": TorchXlaRunner,
    "openxla": partial(TorchXlaRunner, compiler="openxla"),
    "inductor": partial(TorchRunner, compiler="inductor"),
    "vllm-torch_xla": partial(TorchXlaRunner, new_model=_vllm_model),
    "vllm-openxla": partial(TorchXlaRunner, new_model=_vllm_model, compiler="openxla"),
}
