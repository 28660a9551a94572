"""A Llama in plain JAX over a paged cache. One function serves prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_frontend
from shared_ffi.batch import Batch
from xla_paged_attention.engine.model import Config

Params = Mapping[str, jax.Array]
Attend = Callable[..., tuple[jax.Array, Any]]
"""``attend_to_cache``, ``attend_to_packed``, or another function of its arguments."""


class Rope(NamedTuple):
    """The rotary embedding of a step's tokens, as ``kv_cache_update`` takes it."""

    positions: jax.Array
    """``[num_tokens]``: each token's row of ``cos_sin_cache``."""
    cos_sin_cache: jax.Array
    """``[num_tokens, head_size]`` float32: cosines of the angles, then sines."""


def new_caches(
    config: Config, num_blocks: int, block_size: int, dtype: jnp.dtype
) -> list[jax.Array]:
    """An empty cache for each layer, ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``."""
    shape = (num_blocks, block_size, 2 * config.num_kv_heads, config.head_size)
    return [jnp.zeros(shape, dtype) for _ in config.sliding_windows]


def forward(
    params: Params, caches: list[jax.Array], batch: Batch, config: Config
) -> tuple[jax.Array, list[jax.Array]]:
    """Runs one step. Jit it with the caches donated, and they are updated in place.

    Returns:
        The logits of each sequence's last token, ``[max_seqs, vocab_size]`` float32, and the
        caches.
    """
    x, layers = hidden(params, caches, batch, config, attend_to_cache)
    last = x[batch.query_start_loc[1:] - 1]
    return logits(params, last, config), [cache for cache, _ in layers]


def hidden(
    params: Params, caches: list[Any], batch: Batch, config: Config, attend: Attend
) -> tuple[jax.Array, list[Any]]:
    """The last layer's ``[num_tokens, hidden_size]``, and what `attend` makes of the caches."""
    x = params["embed_tokens.weight"][batch.tokens]
    rope = _rope(batch.positions, config)
    updated = []
    for layer, cache in enumerate(caches):
        attended, cache = _attention(params, layer, x, rope, cache, batch, config, attend)
        updated.append(cache)
        x = x + attended
        x = x + _mlp(params, layer, x, config)
    return x, updated


def logits(params: Params, x: jax.Array, config: Config) -> jax.Array:
    """``[..., vocab_size]`` float32, of what the last layer gives."""
    return _linear(params, "lm_head", _norm(params, "norm", x, config)).astype(jnp.float32)


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rope: Rope,
    cache: jax.Array,
    batch: Batch,
    window: int | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Rotates queries and keys, writes the cache, then attends to it. Returns the result, the
    updated cache and the rotated queries."""
    cache, query = jax_frontend.kv_cache_update(
        cache, key, value, batch.slot_mapping, query=query, **rope._asdict()
    )
    attended = jax_frontend.paged_attention(
        query,
        cache,
        batch.context_lens,
        batch.block_tables,
        batch.query_start_loc,
        batch.num_seqs,
        scale=query.shape[-1] ** -0.5,
        sliding_window=window,
    )
    return attended, (cache, query)


def packed_logits(params: Params, batch: Batch, config: Config) -> jax.Array:
    """The logits of all tokens of packed sequences, ``[num_tokens, vocab_size]`` float32.

    There is no cache, and there are derivatives with respect to `params`. On a CPU in float32 the
    logits have the bits of those that ``forward`` gave.

    Args:
        params: the weights, by their names.
        batch: as ``pack`` builds it.
        config: sizes.
    """
    caches = [None] * len(config.sliding_windows)
    x, _ = hidden(params, caches, batch, config, attend_to_packed)
    return logits(params, x, config)


def attend_to_packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rope: Rope,
    cache: Any,
    batch: Batch,
    window: int | None,
) -> tuple[jax.Array, Any]:
    """Rotates queries and keys, then attends to the keys of the batch itself. Returns the result,
    and `cache` as it is."""
    attended = jax_frontend.varlen_attention(
        rotate(query, rope),
        rotate(key, rope),
        value,
        batch.query_start_loc,
        batch.num_seqs,
        scale=query.shape[-1] ** -0.5,
        sliding_window=window,
    )
    return attended, cache


@jax.custom_vjp
def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates heads, ``[num_tokens, num_heads, head_size]``, to the bits that ``kv_cache_update``
    gives: XLA alone fuses products and sums. It has a derivative with respect to `x`."""
    nothing, slots = jnp.zeros((1, 1, 2, x.shape[-1]), x.dtype), jnp.full(len(x), -1, jnp.int32)
    row = x[:, :1]
    return jax_frontend.kv_cache_update(nothing, row, row, slots, query=x, **rope._asdict())[1]


def _rotate_back(rope: Rope, gradient: jax.Array) -> tuple[jax.Array, None]:
    cos, sin = jnp.split(rope.cos_sin_cache, 2, -1)
    return rotate(gradient, rope._replace(cos_sin_cache=jnp.concatenate([cos, -sin], -1))), None


rotate.defvjp(lambda x, rope: (rotate(x, rope), rope), _rotate_back)


def _attention(
    params: Params,
    layer: int,
    x: jax.Array,
    rope: Rope,
    cache: Any,
    batch: Batch,
    config: Config,
    attend: Attend,
) -> tuple[jax.Array, Any]:
    """The attention of a layer. Returns the result and what `attend` makes of the cache."""
    name = f"layers.{layer}.self_attn"
    x = _norm(params, f"layers.{layer}.input_layernorm", x, config)

    def heads(projection: str, count: int) -> jax.Array:
        projected = _linear(params, f"{name}.{projection}", x)
        return projected.reshape(-1, count, config.head_size)

    query = heads("q_proj", config.num_heads)
    key = heads("k_proj", config.num_kv_heads)
    value = heads("v_proj", config.num_kv_heads)
    if f"{name}.q_norm.weight" in params:  # Qwen 3
        query = _norm(params, f"{name}.q_norm", query, config)
        key = _norm(params, f"{name}.k_norm", key, config)

    window = config.sliding_windows[layer]
    attended, cache = attend(query, key, value, rope, cache, batch, window)
    attended = attended.reshape(-1, config.num_heads * config.head_size)
    return _linear(params, f"{name}.o_proj", attended), cache


def _mlp(params: Params, layer: int, x: jax.Array, config: Config) -> jax.Array:
    name = f"layers.{layer}.mlp"
    x = _norm(params, f"layers.{layer}.post_attention_layernorm", x, config)
    gate = jax.nn.silu(_linear(params, f"{name}.gate_proj", x))
    return _linear(params, f"{name}.down_proj", gate * _linear(params, f"{name}.up_proj", x))


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    y = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias


def _norm(params: Params, name: str, x: jax.Array, config: Config) -> jax.Array:
    """Divides by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    # A product with a matrix of ones: on the CPU, XLA's sums add up a row in another order where
    # there are more rows, its products of two rows and more do not.
    ones = jnp.ones((x.shape[-1], 2), jnp.float32)
    mean_square = ((wide * wide) @ ones)[..., :1] / x.shape[-1]
    normalized = wide * jax.lax.rsqrt(mean_square + config.norm_epsilon)
    return params[f"{name}.weight"] * normalized.astype(x.dtype)


def _rope(positions: jax.Array, config: Config) -> Rope:
    inv_freq = jnp.array(config.inv_freq, jnp.float32)
    angles = positions[:, None].astype(jnp.float32) * inv_freq
    cos_sin_cache = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) * config.rope_scale
    return Rope(jnp.arange(len(positions), dtype=jnp.int32), cos_sin_cache)
