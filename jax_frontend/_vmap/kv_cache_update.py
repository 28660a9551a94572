"""``jax.vmap`` of ``kv_cache_update``: one update of one pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_frontend._vmap.operands import BatchedCall, Operand, exceeds, flatten, numbers_in_pool
from shared_ffi import kv_layout as _kv_layout
from shared_ffi.kv_cache_update import OP


def batch(
    size: int, operands: Mapping[str, Operand], options: Mapping[str, Any]
) -> BatchedCall | None:
    """The calls' blocks become one pool, their tokens one batch. Calls that start from the same
    cache get a copy each. Calls with several tables of cosines and sines, several weights of norms,
    or several signs, have no call like that."""
    slot_mapping = operands["slot_mapping"]
    caches = {name: x for name, x in operands.items() if name in ("kv_cache", "value_cache")}
    scales = {name: x for name, x in operands.items() if name in ("k_scale", "v_scale")}
    per_position = {name: x for name, x in scales.items() if len(x.shape) >= 3}
    per_position |= {name: x for name, x in operands.items() if name.endswith("_scale_cache")}
    others = {name: x for name, x in scales.items() if name not in per_position}
    of_calls = ("cos_sin_cache", "q_norm", "k_norm", "k_global", "v_global", "hadamard_signs")
    others |= {name: x for name, x in operands.items() if name in of_calls}
    of_tokens = {
        name: x for name, x in operands.items() if name in ("key", "value", "query", "positions")
    }
    layout = options.get("kv_layout") or _kv_layout.default_layout(
        is_separate="value_cache" in caches, is_latent=operands["value"].shape[2] == 0
    )
    shape = operands["kv_cache"].shape
    num_blocks, block_size = _kv_layout.num_blocks_and_size(OP, layout, shape)
    num_slots = num_blocks * block_size
    largest = jnp.iinfo(slot_mapping.array.dtype).max
    if exceeds(size * num_slots, largest) or any(x.is_mapped for x in others.values()):
        return None
    layout, dim = _kv_layout.stacked(layout)

    def unbatch(results: Sequence[jax.Array]) -> list[jax.Array]:
        updated = [jnp.moveaxis(x, dim, 0) for x in results[: len(caches)]]
        return [*updated, *(x.reshape(size, -1, *x.shape[1:]) for x in results[len(caches) :])]

    return BatchedCall(
        {name: jnp.moveaxis(x.broadcast(size), 0, dim) for name, x in caches.items()}
        | {name: x.array for name, x in others.items()}
        | {name: flatten(x.broadcast(size)) for name, x in (per_position | of_tokens).items()}
        | {"slot_mapping": flatten(numbers_in_pool(slot_mapping.broadcast(size), num_slots))},
        unbatch,
        {"kv_layout": layout},
    )
