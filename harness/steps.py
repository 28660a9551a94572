"""The same step of one attention layer through each backend: kv_cache_update, then
paged_attention, the cache in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_xla
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from harness import hlo
from harness.arrays import DTYPES, to_numpy, to_torch
from harness.workload import Model
from xla_paged_attention.engine.scheduler import Step


class Operands(NamedTuple):
    """What a step brings: new tokens, and the metadata of the batch."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    slot_mapping: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    query_start_loc: np.ndarray
    num_seqs: np.ndarray


class TokenValues:
    """Query, key and value of a token: a function of request and position, so that a token that is
    computed anew after preemption has the values it had."""

    _POOL = 4096

    def __init__(self, model: Model, dtype: str) -> None:
        rng = np.random.default_rng(0)
        self._pools = [
            rng.standard_normal((self._POOL, heads, model.head_size)).astype(DTYPES[dtype])
            for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
        ]

    def operands(self, step: Step) -> Operands:
        """The operands of a step, padded to its bucket."""
        batch = step.batch([[chunk.request] * chunk.num_tokens for chunk in step.chunks])
        mixed = batch.tokens * np.int64(7919) + batch.positions * np.int64(104_729)
        query, key, value = (
            pool[(mixed + 31 * i) % self._POOL] for i, pool in enumerate(self._pools)
        )
        return Operands(query, key, value, *batch[2:])


class LayerRunner(ABC):
    """Runs the step through one backend, with a cache of its own."""

    name: str

    @abstractmethod
    def run(self, operands: Operands) -> np.ndarray:
        """The attention output of a step."""

    @abstractmethod
    def compiles(self) -> int:
        """Programs compiled for the step so far, as the framework counts them."""

    @abstractmethod
    def cache(self) -> np.ndarray:
        """The cache as it stands."""

    def hlo(self, operands: Operands) -> str | None:
        """HLO text of the step before optimization, where there is one."""
        return None


class JaxRunner(LayerRunner):
    """jax.jit, the cache donated."""

    name = "JAX"

    out_shardings: Any = None  # of the cache and the output

    def __init__(self, model: Model, cache: np.ndarray) -> None:
        self._cache = self._place(cache)

        def step(
            kv_cache: Any, query: Any, key: Any, value: Any, slots: Any, *metadata: Any
        ) -> Any:
            kv_cache = jax_frontend.kv_cache_update(kv_cache, key, value, slots)
            output = jax_frontend.paged_attention(query, kv_cache, *metadata, **model.attributes())
            return kv_cache, output

        self._step = jax.jit(step, donate_argnums=0, out_shardings=self.out_shardings)

    def _place(self, cache: np.ndarray) -> jax.Array:
        return jnp.asarray(cache)

    def run(self, operands: Operands) -> np.ndarray:
        """As in LayerRunner."""
        self._cache, output = self._step(self._cache, *operands)
        return np.asarray(output)

    def compiles(self) -> int:
        """As in LayerRunner."""
        return int(self._step._cache_size())  # type: ignore[attr-defined]

    def cache(self) -> np.ndarray:
        """As in LayerRunner."""
        return np.asarray(self._cache)

    def hlo(self, operands: Operands) -> str | None:
        """As in LayerRunner."""
        return self._step.lower(self._cache, *operands).as_text("hlo")


class JaxMeshRunner(JaxRunner):
    """jax.jit on all devices, those of other processes included. They share the kv heads."""

    name = "JAX-mesh"

    def __init__(self, model: Model, cache: np.ndarray) -> None:
        devices = jax.devices()
        if model.num_kv_heads % len(devices):
            raise ValueError(
                f"the {len(devices)} devices of JAX must share the model's {model.num_kv_heads} kv "
                "heads evenly (JAX_NUM_CPU_DEVICES=n gives a CPU n devices)"
            )
        mesh = Mesh(np.array(devices), ("heads",))
        self._whole = NamedSharding(mesh, P())
        self.out_shardings = NamedSharding(mesh, P(None, None, "heads")), self._whole
        super().__init__(model, cache)

    def _place(self, cache: np.ndarray) -> jax.Array:
        sharding = self.out_shardings[0]
        return jax.make_array_from_callback(cache.shape, sharding, lambda index: cache[index])

    def cache(self) -> np.ndarray:
        """As in LayerRunner."""
        return np.asarray(jax.jit(lambda x: x, out_shardings=self._whole)(self._cache))

    def hlo(self, operands: Operands) -> None:
        """None: each device has a program of its own, with its heads."""


class TorchRunner(LayerRunner):
    """Eager PyTorch on the CPU."""

    name = "torch"

    def __init__(self, model: Model, cache: np.ndarray) -> None:
        self._attributes = model.attributes()
        self._cache = self._place(to_torch(cache))
        self._function = self._step

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _step(
        self,
        kv_cache: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        *metadata: torch.Tensor,
    ) -> torch.Tensor:
        torch.ops.xla_gpu.kv_cache_update(kv_cache, key, value, slots)
        output: torch.Tensor = torch.ops.xla_gpu.paged_attention(
            query, kv_cache, *metadata, **self._attributes
        )
        return output

    @torch.no_grad()
    def run(self, operands: Operands) -> np.ndarray:
        """As in LayerRunner."""
        tensors = [self._place(to_torch(array)) for array in operands]
        return to_numpy(self._function(self._cache, *tensors))

    def compiles(self) -> int:
        """As in LayerRunner."""
        return 0

    def cache(self) -> np.ndarray:
        """As in LayerRunner."""
        return to_numpy(self._cache)


class TorchXlaRunner(TorchRunner):
    """torch_xla's lazy mode, one graph a step."""

    name = "torch_xla"

    def __init__(self, model: Model, cache: np.ndarray) -> None:
        super().__init__(model, cache)
        torch_xla.sync(wait=True)
        self._compiles = 0

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch_xla.device())

    @torch.no_grad()
    def run(self, operands: Operands) -> np.ndarray:
        """As in LayerRunner."""
        before = hlo.torch_xla_compiles()
        tensors = [self._place(to_torch(array)) for array in operands]
        output = self._function(self._cache, *tensors)
        torch_xla.sync()
        result = to_numpy(output)
        self._compiles += hlo.torch_xla_compiles() - before
        return result

    def compiles(self) -> int:
        """As in LayerRunner."""
        return self._compiles

    @torch.no_grad()
    def hlo(self, operands: Operands) -> str:
        """As in LayerRunner."""
        tensors = [self._place(to_torch(array)) for array in operands]
        cache = self._cache.clone()
        output = self._step(cache, *tensors)
        return hlo.from_torch_xla([cache, output])


class OpenXlaRunner(TorchXlaRunner):
    """torch.compile with torch_xla's backend."""

    name = "openxla"

    def __init__(self, model: Model, cache: np.ndarray) -> None:
        super().__init__(model, cache)
        self._function = torch.compile(self._step, backend="openxla", fullgraph=True, dynamic=False)


RUNNERS: dict[str, Callable[[Model, np.ndarray], LayerRunner]] = {
    runner.name.lower(): runner
    for runner in (JaxRunner, TorchXlaRunner, OpenXlaRunner, TorchRunner, JaxMeshRunner)
}
