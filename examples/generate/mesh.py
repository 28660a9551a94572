"""The JAX backend on several devices, and in several processes: ``[DATA, HEADS]`` devices, where each
row of HEADS devices shares one copy of the model, and each column holds the same kv heads."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.generate.batch import Batch
from examples.generate.checkpoint import Checkpoint, Config
from examples.generate.backends import Backend
from examples.generate.llama_jax import Params, forward
from examples.scheduler import Limits
from harness.arrays import to_numpy

DATA, HEADS = "data", "heads"
_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")


class JaxMeshBackend(Backend):
    """jax.jit over a mesh. The model is that of one device: the weights are sharded, and the ops
    share their kv heads."""

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
        self._params = {
            name: self._put(to_numpy(weight), _weight_spec(name, tuple(weight.shape), num_parts))
            for name, weight in checkpoint.weights.items()
        }
        rows = (2 * config.num_kv_heads, config.head_size)
        # The pools of all replicas, one after the other: each has its blocks, from 0 on.
        cache = (self.replicas * limits.num_blocks, limits.block_size, *rows)
        dtype = self._params["embed_tokens.weight"].dtype
        of_cache = NamedSharding(self._mesh, P(DATA, None, HEADS))
        new_cache = jax.jit(partial(jnp.zeros, cache, dtype), out_shardings=of_cache)
        self._caches = [new_cache() for _ in config.sliding_windows]
        self._forward = jax.jit(
            jax.shard_map(
                partial(_forward_of_replica, config=config),
                mesh=self._mesh,
                in_specs=(P(), P(DATA), P(DATA)),
                out_specs=(P(DATA), P(DATA)),
                axis_names={DATA},  # XLA partitions along the heads
                check_vma=False,
            ),
            donate_argnums=1,
            # Every process chooses all tokens, so that none has to tell the others.
            out_shardings=(NamedSharding(self._mesh, P()), [of_cache] * len(self._caches)),
        )

    def step(self, batch: Batch) -> np.ndarray:
        """As in Backend."""
        logits, self._caches = self._forward(self._params, self._caches, self._placed(batch))
        return np.asarray(logits)

    def compiles(self) -> int:
        """As in Backend."""
        return int(self._forward._cache_size())  # type: ignore[attr-defined]

    def hlo(self, batch: Batch) -> str:
        """HLO text of one device's program."""
        text = self._forward.lower(self._params, self._caches, self._placed(batch)).compile()
        return text.as_text() or ""

    def _placed(self, batch: Batch) -> Batch:
        several = batch if self.replicas > 1 else Batch(*(array[None] for array in batch))
        return Batch(*(self._put(array, P(DATA)) for array in several))

    def _put(self, array: np.ndarray, spec: P) -> jax.Array:
        """Like jax.device_put, but also where other processes have some of the devices."""
        sharding = NamedSharding(self._mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _forward_of_replica(
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
