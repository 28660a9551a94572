"""A Llama in plain JAX over a paged cache. One function serves prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
    """The rotary embedding of a step's tokens, and the norms of heads before it."""

    positions: jax.Array
    """``[num_tokens]``: each token's row of ``cos_sin_cache``."""
    cos_sin_cache: jax.Array
    """``[num_tokens, head_size]`` float32: cosines of the angles, then sines."""
    norm_eps: float
    """What a norm adds to the mean of squares."""
    q_norm: jax.Array | None = None
    """``[head_size]``: the weights of the norm of queries, as Qwen 3 has it."""
    k_norm: jax.Array | None = None
    """The same for keys."""

    def arguments(self) -> dict[str, Any]:
        """What ``kv_cache_update`` takes."""
        if self.q_norm is not None:
            return {**self._asdict(), "norm_round_first": True}
        return {"positions": self.positions, "cos_sin_cache": self.cos_sin_cache}


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
    """Normalizes and rotates queries and keys, writes the cache, then attends to it. Returns the
    result, the updated cache and the rotated queries."""
    cache, query = jax_frontend.kv_cache_update(
        cache, key, value, batch.slot_mapping, query=query, **rope.arguments()
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
    """Normalizes and rotates queries and keys, then attends to the keys of the batch itself.
    Returns the result, and `cache` as it is."""
    attended = jax_frontend.varlen_attention(
        *rotated(query, key, rope),
        value,
        batch.query_start_loc,
        batch.num_seqs,
        scale=query.shape[-1] ** -0.5,
        sliding_window=window,
    )
    return attended, cache


def rotated(query: jax.Array, key: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Queries and keys, ``[num_tokens, heads, head_size]``, normalized and rotated to the bits that
    ``kv_cache_update`` gives: XLA alone fuses products and sums. There are derivatives."""
    table = rope.cos_sin_cache
    return (
        _rotated(query, table, rope.q_norm, rope.norm_eps),
        _rotated(key, table, rope.k_norm, rope.norm_eps),
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotated(x: jax.Array, table: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    nothing, slots = jnp.zeros((1, 1, 2, x.shape[-1]), x.dtype), jnp.full(len(x), -1, jnp.int32)
    row, numbers = x[:, :1], jnp.arange(len(x), dtype=jnp.int32)
    arguments = Rope(numbers, table, eps, q_norm=weight).arguments()
    return jax_frontend.kv_cache_update(nothing, row, row, slots, query=x, **arguments)[1]


def _forward(
    x: jax.Array, table: jax.Array, weight: jax.Array | None, eps: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
    return _rotated(x, table, weight, eps), (x, table, weight)


def _backward(
    eps: float, saved: tuple[jax.Array, jax.Array, jax.Array | None], gradient: jax.Array
) -> tuple[jax.Array, None, jax.Array | None]:
    x, table, weight = saved
    cos, sin = jnp.split(table, 2, -1)
    gradient = _rotated(gradient, jnp.concatenate([cos, -sin], -1), None, eps)
    if weight is None:
        return gradient, None, None
    of_x, of_weight = jax.vjp(partial(_normalized, eps=eps), x, weight)[1](gradient)
    return of_x, None, of_weight


_rotated.defvjp(_forward, _backward)


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
    q_norm, k_norm = (params.get(f"{name}.{x}.weight") for x in ("q_norm", "k_norm"))
    rope = rope._replace(q_norm=q_norm, k_norm=k_norm)
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
    return _normalized(x, params[f"{name}.weight"], config.norm_epsilon)


def _normalized(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    # A product with a matrix of ones: on the CPU, XLA's sums add up a row in another order where
    # there are more rows, its products of two rows and more do not.
    ones = jnp.ones((x.shape[-1], 2), jnp.float32)
    mean_square = ((wide * wide) @ ones)[..., :1] / x.shape[-1]
    normalized = wide * jax.lax.rsqrt(mean_square + eps)
    return weight * normalized.astype(x.dtype)


def _rope(positions: jax.Array, config: Config) -> Rope:
    inv_freq = jnp.array(config.inv_freq, jnp.float32)
    angles = positions[:, None].astype(jnp.float32) * inv_freq
    cos_sin_cache = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) * config.rope_scale
    numbers = jnp.arange(len(positions), dtype=jnp.int32)
    return Rope(numbers, cos_sin_cache, config.norm_epsilon)
