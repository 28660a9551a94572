"""Tries the ops in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jax_frontend
from shared_ffi import tiny_step


def _step(
    cache: jax.Array, key: jax.Array, value: jax.Array, slots: jax.Array, *attention: jax.Array
) -> jax.Array:
    query, lens, tables, starts, num_seqs = attention
    cache = jax_frontend.kv_cache_update(cache, key, value, slots)
    return jax_frontend.paged_attention(
        query, cache, lens, tables, starts, num_seqs, tiny_step.SCALE
    )


def run() -> str:
    """Runs the tiny step on JAX's default device, whose name it returns."""
    output = jax.jit(_step)(*map(jnp.asarray, tiny_step.operands()))
    tiny_step.check(output.ravel())
    (device,) = output.devices()
    return device.device_kind
