"""tpu-inference's ``sharded_ragged_paged_attention``, which MaxText calls."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_frontend._call import takes_arrays
from jax_frontend.compat._ragged_v3 import ragged_paged_attention_hd64, ragged_paged_attention_v3
from shared_ffi.spec import value_error

OP = "tpu_inference.sharded_ragged_paged_attention"

# The axes of tpu-inference's meshes that divide sequences, and those that divide heads.
_DATA = ("data", "attn_dp", "attn_dp_expert")
_HEADS = ("model", "expert", "dcp")


@takes_arrays(OP)
def sharded_ragged_paged_attention(
    mesh: Mesh,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None,
    sm_scale: float,
    attention_chunk_size: int | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    update_kv_cache: bool = True,
    use_causal_mask: bool = True,
    attn_logits_soft_cap: float | None = None,
    decode_query_size: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """``ragged_paged_attention_v3`` on a mesh: tokens and pages along its axes ``data``,
    ``attn_dp`` and ``attn_dp_expert``, heads along ``model``, ``expert`` and ``dcp``. A mesh need
    not have all of them.

    Args:
        q, k, v: ``[max_num_tokens, heads, head_dim]``: ``queries``, ``keys`` and ``values`` there.
            Where there are fewer kv heads than devices along the axes of heads, each is repeated.
        kv_cache: that of ``ragged_paged_attention_v3``; with a head_dim of 64, that of
            ``ragged_paged_attention_hd64``. It has a row for each repeated head.
        kv_lens, page_indices, cu_q_lens, distribution: as there, for each part of the sequences one
            after the other.
        attention_sink: ``[num_q_heads]``, or None.
        sm_scale: factor of ``q . k``.
        attention_chunk_size: the sliding window.
        attn_logits_soft_cap: the soft cap.
        q_scale, k_scale, v_scale, update_kv_cache, use_causal_mask: as there.
        decode_query_size: tunes a TPU's kernel; not used.

    Returns:
        The output, ``[max_num_tokens, num_q_heads, head_dim]``, and the updated cache.

    Raises:
        ValueError, TypeError: as ``ragged_paged_attention_v3``; ValueError also if the kv heads
            cannot be repeated or divided evenly.
    """
    data, heads = (
        tuple(axis for axis in axes if axis in mesh.axis_names) for axes in (_DATA, _HEADS)
    )
    num_parts = math.prod(mesh.shape[axis] for axis in heads)
    if k.ndim == 3 and 0 < k.shape[1] < num_parts:
        if num_parts % k.shape[1] != 0:
            rule = f"divide or be a multiple of the {num_parts} devices that share the heads"
            remedy = "Give the mesh other numbers of devices along its axes of heads"
            raise value_error(OP, "k's num_kv_heads", rule, k.shape[1], remedy)
        k, v = (jnp.repeat(x, num_parts // x.shape[1], axis=1) for x in (k, v))
    attend = ragged_paged_attention_hd64 if q.shape[-1] == 64 else ragged_paged_attention_v3
    rows, cache = PartitionSpec(data, heads), PartitionSpec(data, None, heads)
    sinks = [] if attention_sink is None else [attention_sink]
    of_sinks = [PartitionSpec(heads) for _ in sinks]
    divided = jax.shard_map(
        partial(
            attend,
            sm_scale=sm_scale,
            sliding_window=attention_chunk_size,
            soft_cap=attn_logits_soft_cap,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            update_kv_cache=update_kv_cache,
            use_causal_mask=use_causal_mask,
        ),
        mesh=mesh,
        in_specs=(rows, rows, rows, cache, *([PartitionSpec(data)] * 4), *of_sinks),
        out_specs=(rows, cache),
        check_vma=False,
    )
    return divided(q, k, v, kv_cache, kv_lens, page_indices, cu_q_lens, distribution, *sinks)
