"""The same step through each backend: kv_cache_update, then paged_attention, the cache in place."""

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
from examples.replay.models import Model
from harness import hlo
from harness.arrays import to_numpy, to_torch


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


class Backend(ABC):
    """One way into the ops, with a cache of its own."""

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


class JaxBackend(Backend):
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
        """As in Backend."""
        self._cache, output = self._step(self._cache, *operands)
        return np.asarray(output)

    def compiles(self) -> int:
        """As in Backend."""
        return int(self._step._cache_size())  # type: ignore[attr-defined]

    def cache(self) -> np.ndarray:
        """As in Backend."""
        return np.asarray(self._cache)

    def hlo(self, operands: Operands) -> str | None:
        """As in Backend."""
        return self._step.lower(self._cache, *operands).as_text("hlo")


class JaxMeshBackend(JaxBackend):
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
        """As in Backend."""
        return np.asarray(jax.jit(lambda x: x, out_shardings=self._whole)(self._cache))

    def hlo(self, operands: Operands) -> None:
        """None: each device has a program of its own, with its heads."""


class TorchBackend(Backend):
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
        """As in Backend."""
        tensors = [self._place(to_torch(array)) for array in operands]
        return to_numpy(self._function(self._cache, *tensors))

    def compiles(self) -> int:
        """As in Backend."""
        return 0

    def cache(self) -> np.ndarray:
        """As in Backend."""
        return to_numpy(self._cache)


class TorchXlaBackend(TorchBackend):
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
        """As in Backend."""
        before = hlo.torch_xla_compiles()
        tensors = [self._place(to_torch(array)) for array in operands]
        output = self._function(self._cache, *tensors)
        torch_xla.sync()
        result = to_numpy(output)
        self._compiles += hlo.torch_xla_compiles() - before
        return result

    def compiles(self) -> int:
        """As in Backend."""
        return self._compiles

    @torch.no_grad()
    def hlo(self, operands: Operands) -> str:
        """As in Backend."""
        tensors = [self._place(to_torch(array)) for array in operands]
        cache = self._cache.clone()
        output = self._step(cache, *tensors)
        return hlo.from_torch_xla([cache, output])


class OpenXlaBackend(TorchXlaBackend):
    """torch.compile with torch_xla's backend."""

    name = "openxla"

    def __init__(self, model: Model, cache: np.ndarray) -> None:
        super().__init__(model, cache)
        self._function = torch.compile(self._step, backend="openxla", fullgraph=True, dynamic=False)


BACKENDS: dict[str, Callable[[Model, np.ndarray], Backend]] = {
    backend.name.lower(): backend for backend in (JaxBackend, TorchXlaBackend, OpenXlaBackend, TorchBackend, JaxMeshBackend)
}
