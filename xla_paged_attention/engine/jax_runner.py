"""Runs the model's steps in JAX, on one device or on a mesh of devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_ffi.batch import Batch
from shared_ffi.spec import value_error
from xla_paged_attention.engine.llama_jax import Params, forward, new_caches
from xla_paged_attention.engine.model import Config, Model
from xla_paged_attention.engine.runner import ModelRunner
from xla_paged_attention.engine.scheduler import Limits

DATA, HEADS = "data", "heads"
_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")


class JaxRunner(ModelRunner):
    """jax.jit, the caches donated.

    Args:
        model: sizes and weights, which are copied to JAX's default device.
        limits: sizes of a step and of the pool.

    Attributes:
        params: the weights, by their names. Some or all may be replaced between two steps.
        caches: one for each layer, ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``, in
            the weights' dtype.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self.params = {name: _array(weight) for name, weight in model.weights.items()}
        self.caches = new_caches(
            model.config,
            limits.num_blocks,
            limits.block_size,
            self.params["embed_tokens.weight"].dtype,
        )
        self._forward = jax.jit(partial(forward, config=model.config), donate_argnums=1)

    def step(self, batch: Batch) -> np.ndarray:
        """As in ModelRunner."""
        logits, self.caches = self._forward(self.params, self.caches, self._placed(batch))
        return np.asarray(logits)

    def weights(self) -> list[tuple[Any, int]]:
        """As in ModelRunner."""
        return [(weight, 0) for weight in self.params.values()]

    def compiles(self) -> int:
        """As in ModelRunner."""
        return int(self._forward._cache_size())  # type: ignore[attr-defined]

    def hlo(self, batch: Batch) -> str:
        """As in ModelRunner."""
        return self._forward.lower(self.params, self.caches, batch).as_text("hlo")

    def _placed(self, batch: Batch) -> Batch:
        """The batch as the program takes it."""
        return batch


class JaxMeshRunner(JaxRunner):
    """jax.jit over a mesh of ``[DATA, HEADS]`` devices, those of other processes included.

    Each row of HEADS devices shares one copy of the model, and each column holds the same kv heads.
    The model is that of one device: the weights are sharded, and the ops share their kv heads.

    Args:
        model: sizes and weights.
        limits: sizes of a step, and of the pool of each replica.
        shape: replicas, and the devices of each. Their product is the number of JAX's devices.

    Attributes:
        params: the weights, by their names, sharded. Some or all may be replaced between two steps.
        caches: one for each layer, ``[replicas * num_blocks, block_size, 2 * num_kv_heads,
            head_size]``: the pools of the replicas, one after the other.

    Raises:
        ValueError: there is another number of devices, or they cannot share the heads.
    """

    def __init__(self, model: Model, limits: Limits, shape: tuple[int, int]) -> None:
        config, (self.replicas, num_parts) = model.config, shape
        devices = jax.devices()
        if self.replicas * num_parts != len(devices):
            rule = f"have the {len(devices)} devices that JAX has"
            got = f"{self.replicas} x {num_parts}"
            remedy = "JAX_NUM_CPU_DEVICES=n gives a CPU n of them"
            raise value_error("JaxMeshRunner", "shape", rule, got, remedy)
        if config.num_kv_heads % num_parts:
            rule = f"share the model's {config.num_kv_heads} kv heads evenly"
            remedy = "Its second number divides them"
            raise value_error("JaxMeshRunner", "shape", rule, num_parts, remedy)
        self._mesh = Mesh(np.array(devices).reshape(shape), (DATA, HEADS))
        self.params = {
            name: self._put(weight, _weight_spec(name, weight.shape, num_parts))
            for name, weight in ((x, np.asarray(_array(y))) for x, y in model.weights.items())
        }
        rows = (2 * config.num_kv_heads, config.head_size)
        # The pools of all replicas, one after the other: each has its blocks, from 0 on.
        cache = (self.replicas * limits.num_blocks, limits.block_size, *rows)
        dtype = self.params["embed_tokens.weight"].dtype
        cache_sharding = NamedSharding(self._mesh, P(DATA, None, HEADS))
        new_cache = jax.jit(partial(jnp.zeros, cache, dtype), out_shardings=cache_sharding)
        self.caches = [new_cache() for _ in config.sliding_windows]
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
            out_shardings=(NamedSharding(self._mesh, P()), [cache_sharding] * len(self.caches)),
        )

    def hlo(self, batch: Batch) -> str:
        """HLO text of one device's program."""
        text = self._forward.lower(self.params, self.caches, self._placed(batch)).compile()
        return text.as_text() or ""

    def _placed(self, batch: Batch) -> Batch:
        several = batch if self.replicas > 1 else Batch(*(array[None] for array in batch))
        return Batch(*(self._put(array, P(DATA)) for array in several))

    def _put(self, array: np.ndarray, spec: P) -> jax.Array:
        """Like jax.device_put, but also where other processes have some of the devices."""
        sharding = NamedSharding(self._mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _array(weight: Any) -> jax.Array:
    """A copy of a weight, so that nobody writes it."""
    if not isinstance(weight, np.ndarray | jax.Array):  # a tensor, perhaps of bfloat16
        weight = np.asarray(jnp.from_dlpack(weight))
    return jnp.array(weight)


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
