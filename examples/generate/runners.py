"""Runs a model's step through each backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_xla
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.generate.llama_jax import Params, forward, new_caches
from examples.generate.llama_torch import Llama
from harness import hlo
from harness.arrays import to_numpy
from harness.checkpoint import Checkpoint, Config
from harness.scheduler import Limits
from shared_ffi.batch import Batch

DATA, HEADS = "data", "heads"
_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")


class ModelRunner(ABC):
    """A way to run the model, with caches of its own."""

    replicas = 1
    """Copies of the model, each with sequences and caches of its own, that run in one step."""

    @abstractmethod
    def step(self, batch: Batch) -> np.ndarray:
        """Runs the model and updates the caches. Returns the logits of each sequence's last token,
        ``[max_seqs, vocab_size]`` float32. With several replicas, each array has one dimension more
        in front, of the replicas."""

    @abstractmethod
    def weights(self) -> list[tuple[Any, int]]:
        """Each array of the weights, and how often it was written in place."""

    @abstractmethod
    def compiles(self) -> int:
        """Programs compiled so far, as the framework counts them."""

    def hlo(self, batch: Batch) -> str | None:
        """HLO text of the step before optimization, where there is one."""
        return None


class JaxRunner(ModelRunner):
    """jax.jit, the caches donated. `params` are the weights; they may be replaced between two
    steps."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        weights = checkpoint.weights.items()
        self.params = {name: jnp.asarray(to_numpy(weight)) for name, weight in weights}
        self._caches = new_caches(
            checkpoint.config,
            limits.num_blocks,
            limits.block_size,
            self.params["embed_tokens.weight"].dtype,
        )
        self._forward = jax.jit(partial(forward, config=checkpoint.config), donate_argnums=1)

    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        logits, self._caches = self._forward(self.params, self._caches, batch)
        return np.asarray(logits)

    def weights(self) -> list[tuple[Any, int]]:
        """As in ModelRunner."""
        return [(weight, 0) for weight in self.params.values()]

    def compiles(self) -> int:
        """As in ModelRunner."""
        return int(self._forward._cache_size())  # type: ignore[attr-defined]

    def hlo(self, batch: Batch) -> str:
        """As in ModelRunner."""
        return self._forward.lower(self.params, self._caches, batch).as_text("hlo")


class JaxMeshRunner(ModelRunner):
    """jax.jit over a mesh of ``[DATA, HEADS]`` devices, those of other processes included.

    Each row of HEADS devices shares one copy of the model, and each column holds the same kv heads.
    The model is that of one device: the weights are sharded, and the ops share their kv heads.
    """

    def __init__(self, checkpoint: Checkpoint, limits: Limits, shape: tuple[int, int]) -> None:
        """`shape`: replicas, and the devices of each.

        Raises:
            ValueError: there is another number of devices, or they cannot share the heads.
        """
        config, (self.replicas, num_parts) = checkpoint.config, shape
        devices = jax.devices()
        if self.replicas * num_parts != len(devices):
            raise ValueError(
                f"--mesh {self.replicas} {num_parts} must use all devices; JAX has {len(devices)} "
                "(JAX_NUM_CPU_DEVICES=n gives a CPU n of them)"
            )
        if config.num_kv_heads % num_parts:
            raise ValueError(
                f"--mesh must share the model's {config.num_kv_heads} kv heads evenly; "
                f"got {num_parts} devices for them"
            )
        self._mesh = Mesh(np.array(devices).reshape(shape), (DATA, HEADS))
        self.params = {
            name: self._put(to_numpy(weight), _weight_spec(name, tuple(weight.shape), num_parts))
            for name, weight in checkpoint.weights.items()
        }
        rows = (2 * config.num_kv_heads, config.head_size)
        # The pools of all replicas, one after the other: each has its blocks, from 0 on.
        cache = (self.replicas * limits.num_blocks, limits.block_size, *rows)
        dtype = self.params["embed_tokens.weight"].dtype
        cache_sharding = NamedSharding(self._mesh, P(DATA, None, HEADS))
        new_cache = jax.jit(partial(jnp.zeros, cache, dtype), out_shardings=cache_sharding)
        self._caches = [new_cache() for _ in config.sliding_windows]
        self._forward = jax.jit(
            jax.shard_map(
                partial(_replica_forward, config=config),
                mesh=self._mesh,
                in_specs=(P(), P(DATA), P(DATA)),
                out_specs=(P(DATA), P(DATA)),
                axis_names={DATA},  # XLA partitions along the heads
                check_vma=False,
            ),
            donate_argnums=1,
            # Every process chooses all tokens, so that none has to tell the others.
            out_shardings=(NamedSharding(self._mesh, P()), [cache_sharding] * len(self._caches)),
        )

    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        logits, self._caches = self._forward(self.params, self._caches, self._placed(batch))
        return np.asarray(logits)

    def weights(self) -> list[tuple[Any, int]]:
        """As in ModelRunner."""
        return [(weight, 0) for weight in self.params.values()]

    def compiles(self) -> int:
        """As in ModelRunner."""
        return int(self._forward._cache_size())  # type: ignore[attr-defined]

    def hlo(self, batch: Batch) -> str:
        """HLO text of one device's program."""
        text = self._forward.lower(self.params, self._caches, self._placed(batch)).compile()
        return text.as_text() or ""

    def _placed(self, batch: Batch) -> Batch:
        several = batch if self.replicas > 1 else Batch(*(array[None] for array in batch))
        return Batch(*(self._put(array, P(DATA)) for array in several))

    def _put(self, array: np.ndarray, spec: P) -> jax.Array:
        """Like jax.device_put, but also where other processes have some of the devices."""
        sharding = NamedSharding(self._mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _replica_forward(
    params: Params, caches: list[jax.Array], batch: Batch, config: Config
) -> tuple[jax.Array, list[jax.Array]]:
    """`forward` for a batch and logits whose first dimension, of the replicas, has the size 1."""
    logits, caches = forward(params, caches, Batch(*(array[0] for array in batch)), config)
    return logits[None], caches


def _weight_spec(name: str, shape: tuple[int, ...], num_parts: int) -> P:
    """Linear layers are cut along their outputs, those after them along their inputs, as in
    Megatron-LM (arXiv:1909.08053). Others are whole on each device."""
    layer = name.split(".")[-2] if "." in name else name
    if layer in _OUTPUTS and shape[0] % num_parts == 0:
        return P(HEADS)
    if layer in _INPUTS and len(shape) == 2 and shape[1] % num_parts == 0:
        return P(None, HEADS)
    return P()


class TorchRunner(ModelRunner):
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
        """As in ModelRunner."""
        return to_numpy(self._forward(self._caches, self._place(batch)))

    def weights(self) -> list[tuple[Any, int]]:
        """As in ModelRunner."""
        return [(weight, weight._version) for weight in self._model.parameters()]

    def compiles(self) -> int:
        """As in ModelRunner."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"] - self._graphs_before)

    def _new_model(self, checkpoint: Checkpoint) -> Llama:
        return Llama(checkpoint.config, checkpoint.weights)

    def _place(self, batch: Batch) -> Batch:
        return Batch(*(torch.from_numpy(array).to(self.device) for array in batch))


class InductorRunner(TorchRunner):
    """torch.compile with its own backend, on the CPU."""

    compiler = "inductor"


class TorchXlaRunner(TorchRunner):
    """torch_xla's lazy mode, one graph a step."""

    device = "xla"

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        super().__init__(checkpoint, limits)
        torch_xla.sync(wait=True)
        self._compiles_before = hlo.torch_xla_compiles()

    @torch.no_grad()
    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        logits = self._forward(self._caches, self._place(batch))
        torch_xla.sync()
        return to_numpy(logits)

    def compiles(self) -> int:
        """As in ModelRunner."""
        return hlo.torch_xla_compiles() - self._compiles_before

    @torch.no_grad()
    def hlo(self, batch: Batch) -> str:
        """As in ModelRunner."""
        caches = [cache.clone() for cache in self._caches]
        logits = self._model(caches, self._place(batch))
        return hlo.from_torch_xla([*caches, logits])


class OpenXlaRunner(TorchXlaRunner):
    """torch.compile with torch_xla's backend, on torch_xla's device."""

    compiler = "openxla"


class VllmTorchXlaRunner(TorchXlaRunner):
    """vLLM's attention layers in torch_xla's lazy mode."""

    def _new_model(self, checkpoint: Checkpoint) -> Llama:
        try:
            from examples.generate.llama_vllm import VllmLlama  # noqa: PLC0415  (needs vLLM)
        except ImportError as error:
            raise ValueError(str(error)) from error
        return VllmLlama(checkpoint.config, checkpoint.weights)


class VllmOpenXlaRunner(VllmTorchXlaRunner):
    """vLLM's attention layers in torch.compile with torch_xla's backend."""

    compiler = "openxla"


RUNNERS: dict[str, Callable[[Checkpoint, Limits], ModelRunner]] = {
    "jax": JaxRunner,
    "torch": TorchRunner,
    "torch_xla": TorchXlaRunner,
    "openxla": OpenXlaRunner,
    "inductor": InductorRunner,
    "vllm-torch_xla": VllmTorchXlaRunner,
    "vllm-openxla": VllmOpenXlaRunner,
}
