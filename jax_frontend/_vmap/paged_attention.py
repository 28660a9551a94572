"""``jax.vmap`` of ``paged_attention``: one ragged batch, and one pool of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_frontend._vmap.operands import (
    MAX_INT32,
    BatchedCall,
    Operand,
    exceeds,
    flatten,
    numbers_in_pool,
    take,
)
from jax_frontend._vmap.ragged_batch import ragged_batch
from shared_ffi import kv_layout as _kv_layout
from shared_ffi.paged_attention import METADATA, OP, TOKEN_PAIRS

_OF_TOKENS = ("query", *TOKEN_PAIRS)
_OF_BATCH = (*_OF_TOKENS, *METADATA, "causal")


class _Pool(NamedTuple):
    block_tables: jax.Array
    """``[size, max_seqs, max_blocks_per_seq]``: one table for each call, of blocks of the pool."""
    arrays: dict[str, jax.Array]
    """The caches, scales and features of the batched call."""
    options: dict[str, Any]
    """The options that differ from those of the calls under ``vmap``."""


def batch(
    size: int, operands: Mapping[str, Operand], options: Mapping[str, Any]
) -> BatchedCall | None:
    """The calls' sequences become one ragged batch; if each call has a cache, their blocks become
    one pool."""
    layout = options.get("kv_layout") or _kv_layout.default_layout(
        is_separate="value_cache" in operands, is_latent=options.get("value_head_size") is not None
    )
    pool = _pool(size, operands, layout)
    ragged = ragged_batch(size, operands)
    if pool is None or ragged is None:
        return None
    lengths = jnp.where(ragged.is_used, operands["context_lens"].broadcast(size), 0)
    of_stray = jnp.where(ragged.is_faulty, -1, 0)  # which the handler refuses
    # An empty table for stray tokens.
    block_tables = jnp.pad(flatten(pool.block_tables), ((0, size), (0, 0)))
    arrays = {name: ragged.take(operands[name]) for name in _OF_TOKENS if name in operands}
    arrays |= {
        "context_lens": jnp.concatenate([flatten(lengths), of_stray]),
        "block_tables": block_tables,
        "query_start_loc": ragged.query_start_loc,
        "num_seqs": ragged.num_seqs,
    }
    if "causal" in operands:  # whatever it is for stray tokens
        arrays["causal"] = jnp.pad(flatten(operands["causal"].broadcast(size)), (0, size))
    return BatchedCall(
        arrays | pool.arrays,
        lambda results: [take(result, (ragged.rows,)) for result in results],
        pool.options,
    )


def _pool(size: int, operands: Mapping[str, Operand], layout: str) -> _Pool | None:
    """One pool for all calls; None if they differ in an array of which a call has only one."""
    arrays = {name: x for name, x in operands.items() if name not in _OF_BATCH}
    caches = [name for name in ("kv_cache", "value_cache") if name in arrays]
    scales = [name for name in ("k_scale", "v_scale") if name in arrays]
    per_position = [name for name in scales if len(arrays[name].shape) >= 3]
    has_own_blocks = any(arrays[name].is_mapped for name in caches)
    stacked = [*caches, *per_position] if has_own_blocks else []
    if any(x.is_mapped for name, x in arrays.items() if name not in stacked):
        return None
    block_tables = operands["block_tables"].broadcast(size)
    shared = {name: x.array for name, x in arrays.items()}
    if not has_own_blocks:
        return _Pool(block_tables, shared, {})
    num_blocks, _ = _kv_layout.num_blocks_and_size(OP, layout, arrays["kv_cache"].shape)
    if exceeds(size * num_blocks, MAX_INT32):
        return None
    layout, dim = _kv_layout.stacked(layout)
    pools = {name: jnp.moveaxis(arrays[name].broadcast(size), 0, dim) for name in caches}
    pools |= {name: flatten(arrays[name].broadcast(size)) for name in per_position}
    return _Pool(numbers_in_pool(block_tables, num_blocks), shared | pools, {"kv_layout": layout})
