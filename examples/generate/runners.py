"""A model's step through each backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_xla

from examples.generate.batch import Batch
from examples.generate.checkpoint import Checkpoint
from examples.generate.llama_jax import forward, new_caches
from examples.generate.llama_torch import Llama
from examples.scheduler import Limits
from harness import hlo
from harness.arrays import to_numpy


class Backend(ABC):
    """A way to run the model, with caches of its own."""

    replicas = 1
    """Copies of the model, each with sequences and caches of its own, that run in one step."""

    @abstractmethod
    def step(self, batch: Batch) -> np.ndarray:
        """Runs the model and updates the caches. Returns the logits of each sequence's last token,
        ``[max_seqs, vocab_size]`` float32. With several replicas, each array has one dimension more
        in front, of the replicas."""

    @abstractmethod
    def compiles(self) -> int:
        """Programs compiled so far, as the framework counts them."""

    def hlo(self, batch: Batch) -> str | None:
        """HLO text of the step before optimization, where there is one."""
        return None


class JaxBackend(Backend):
    """jax.jit, the caches donated."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        weights = checkpoint.weights.items()
        self._params = {name: jnp.asarray(to_numpy(weight)) for name, weight in weights}
        self._caches = new_caches(
            checkpoint.config,
            limits.num_blocks,
            limits.block_size,
            self._params["embed_tokens.weight"].dtype,
        )
        self._forward = jax.jit(partial(forward, config=checkpoint.config), donate_argnums=1)

    def step(self, batch: Batch) -> np.ndarray:
        """As in Backend."""
        logits, self._caches = self._forward(self._params, self._caches, batch)
        return np.asarray(logits)

    def compiles(self) -> int:
        """As in Backend."""
        return int(self._forward._cache_size())  # type: ignore[attr-defined]

    def hlo(self, batch: Batch) -> str:
        """As in Backend."""
        return self._forward.lower(self._params, self._caches, batch).as_text("hlo")


class TorchBackend(Backend):
    """Eager PyTorch on the CPU."""

    device = "cpu"
    compiler: str | None = None  # of torch.compile

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        self._model = self._new_model(checkpoint).to(self.device)
        self._caches = self._model.new_caches(limits.num_blocks, limits.block_size)
        self._forward: Callable[..., torch.Tensor] = self._model
        if self.compiler:
            self._forward = torch.compile(
                self._model, backend=self.compiler, fullgraph=True, dynamic=False
            )
        self._graphs_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @torch.no_grad()
    def step(self, batch: Batch) -> np.ndarray:
        """As in Backend."""
        return to_numpy(self._forward(self._caches, self._place(batch)))

    def compiles(self) -> int:
        """As in Backend."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"] - self._graphs_before)

    def _new_model(self, checkpoint: Checkpoint) -> Llama:
        return Llama(checkpoint.config, checkpoint.weights)

    def _place(self, batch: Batch) -> Batch:
        return Batch(*(torch.from_numpy(array).to(self.device) for array in batch))


class InductorBackend(TorchBackend):
    """torch.compile with its own backend, on the CPU."""

    compiler = "inductor"


class TorchXlaBackend(TorchBackend):
    """torch_xla's lazy mode, one graph a step."""

    device = "xla"

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        torch_xla.sync(wait=True)
        self._compiles_before = hlo.torch_xla_compiles()

    @torch.no_grad()
    def step(self, batch: Batch) -> np.ndarray:
        """As in Backend."""
        logits = self._forward(self._caches, self._place(batch))
        torch_xla.sync()
        return to_numpy(logits)

    def compiles(self) -> int:
        """As in Backend."""
        return hlo.torch_xla_compiles() - self._compiles_before

    @torch.no_grad()
    def hlo(self, batch: Batch) -> str:
        """As in Backend."""
        caches = [cache.clone() for cache in self._caches]
        logits = self._model(caches, self._place(batch))
        return hlo.from_torch_xla([*caches, logits])


class OpenXlaBackend(TorchXlaBackend):
    """torch.compile with torch_xla's backend, on torch_xla's device."""

    compiler = "openxla"


class VllmTorchXlaBackend(TorchXlaBackend):
    """vLLM's attention layers in torch_xla's lazy mode."""

    def _new_model(self, checkpoint: Checkpoint) -> Llama:
        try:
            from examples.generate.llama_vllm import VllmLlama  # noqa: PLC0415  (needs vLLM)
        except ImportError as error:
            raise ValueError(str(error)) from error
        return VllmLlama(checkpoint.config, checkpoint.weights)


class VllmOpenXlaBackend(VllmTorchXlaBackend):
    """vLLM's attention layers in torch.compile with torch_xla's backend."""

    compiler = "openxla"


BACKENDS: dict[str, Callable[[Checkpoint, Limits], Backend]] = {
    "jax": JaxBackend,
    "torch": TorchBackend,
    "torch_xla": TorchXlaBackend,
    "openxla": OpenXlaBackend,
    "inductor": InductorBackend,
    "vllm-torch_xla": VllmTorchXlaBackend,
    "vllm-openxla": VllmOpenXlaBackend,
}
