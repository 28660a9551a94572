"""``kv_cache_update`` for JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp

from jax_frontend import _call, _vmap
from shared_ffi import kv_cache_update as op
from shared_ffi import kv_layout as _kv_layout


@overload
def kv_cache_update(
    kv_cache: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    value_cache: None = None,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array: ...


@overload
def kv_cache_update(
    kv_cache: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    value_cache: jax.Array,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def kv_cache_update(
    kv_cache: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    value_cache: jax.Array | None = None,
    kv_layout: str | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Writes the keys and values of new tokens into their slots of a paged cache.

    The result takes the place of ``kv_cache``. Under ``jax.jit(..., donate_argnums=...)`` it also
    takes its memory: nothing is copied but the new rows. Without donation XLA copies the cache
    first, because the caller still owns the old one.

    Dimensions: ``num_tokens`` new tokens of all sequences; a pool of ``num_blocks`` blocks with
    ``block_size`` positions each.

    Args:
        kv_cache: ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``, float32, float16 or
            bfloat16, or float8_e4m3fn, float8_e5m2 or int8; the K of kv head h at index 2h, its V
            at 2h + 1.
        key: ``[num_tokens, num_kv_heads, head_size]``, dtype of ``kv_cache``, or, if that has 8
            bits, float32, float16 or bfloat16: then it is divided by ``k_scale`` and rounded to
            nearest; what is larger than the cache can hold becomes the largest that it can.
        value: as ``key``.
        slot_mapping: ``[num_tokens]``, int32 or int64: token t goes to slot
            ``block * block_size + offset``. A negative slot is padding and writes nothing. If two
            tokens name one slot, the later one wins.
        value_cache: where K and V are two arrays, that of V; ``kv_cache`` is that of K. Shape and
            dtype of ``kv_cache``.
        kv_layout: which dimension is which, where that is not as above; see ``paged_attention``.
        k_scale: float32, of shape ``[]``, ``[1]``, ``[num_kv_heads]`` or ``[num_blocks,
            block_size, num_kv_heads]``, as ``paged_attention`` takes it: of the last, each key is
            divided by that of its slot. None: 1.
        v_scale: likewise, of the values.

    Returns:
        The updated cache, shape and dtype of ``kv_cache``; with ``value_cache`` a pair of both.

    Raises:
        ValueError: a shape is wrong.
        TypeError: a dtype is wrong.
        jax.errors.JaxRuntimeError: when it runs, INVALID_ARGUMENT: a slot is past the end. The
            cache is left as it was.

    Example:
        With ``block_size=16``, position 37 of a sequence lies in its logical block 2 at offset 5
        (37 = 2 * 16 + 5). If that block is the pool's block 9, the slot is 9 * 16 + 5 = 149.
    """
    updated = _call.run(
        op.check,
        {
            "kv_cache": kv_cache,
            "key": key,
            "value": value,
            "slot_mapping": slot_mapping,
            "value_cache": value_cache,
            "k_scale": k_scale,
            "v_scale": v_scale,
        },
        {"kv_layout": kv_layout},
        _fold,
    )
    return updated[0] if value_cache is None else (updated[0], updated[1])


def _fold(
    size: int, operands: Mapping[str, _vmap.Operand], options: Mapping[str, Any]
) -> _vmap.Folded | None:
    """One cache with the blocks of all, also where the calls begin with the same: each writes into
    its own."""
    slot_mapping = operands["slot_mapping"]
    caches = {name: x for name, x in operands.items() if name in ("kv_cache", "value_cache")}
    scales = {name: x for name, x in operands.items() if name in ("k_scale", "v_scale")}
    num_blocks, block_size = _kv_layout.num_blocks_and_size(
        op.OP, options["kv_layout"], operands["kv_cache"].shape
    )
    num_slots = num_blocks * block_size
    largest = jnp.iinfo(slot_mapping.array.dtype).max
    if size * num_slots > largest or any(x.is_mapped for x in scales.values()):
        return None
    layout, dim = _kv_layout.stacked(options["kv_layout"], is_separate="value_cache" in caches)
    slots = _vmap.renumbered(slot_mapping.of_each(size), num_slots)
    return _vmap.Folded(
        {name: jnp.moveaxis(x.of_each(size), 0, dim) for name, x in caches.items()}
        | {name: x.array for name, x in scales.items()}
        | {name: _vmap.joined(operands[name].of_each(size)) for name in ("key", "value")}
        | {"slot_mapping": _vmap.joined(slots)},
        lambda updated: jnp.moveaxis(updated, dim, 0),
        {"kv_layout": layout},
    )
