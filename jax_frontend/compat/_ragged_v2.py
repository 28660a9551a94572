"""The TPU's ragged paged attention, with its arguments, for JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_frontend.compat._update_and_attend import unit_scale
from jax_frontend.paged_attention import paged_attention
from shared_ffi.paged_attention import check_mask_value
from shared_ffi.spec import dtype_error, shape_error

OP = "ragged_paged_attention"


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float | jax.Array = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """``paged_attention`` with the arguments of the TPU kernel: for code written for TPUs.

    The arguments are those of ``jax.experimental.pallas.ops.tpu.ragged_paged_attention`` and of
    ``torch.ops.xla_gpu.ragged_paged_attention``. It only attends: ``kv_cache_update`` writes the
    cache, and ``ragged_paged_attention_v3`` does both.

    Args:
        q: ``[max_num_batched_tokens, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        kv_pages: ``[total_num_pages, page_size, 2 * num_kv_heads, head_dim]``; see
            ``paged_attention``'s ``kv_cache``.
        kv_lens: ``[max_num_seqs]`` int32, this call's tokens included.
        page_indices: ``[max_num_seqs, pages_per_seq]`` int32.
        cu_q_lens: ``[max_num_seqs + 1]`` int32.
        num_seqs: ``[1]`` int32.
        sm_scale: as ``paged_attention``'s ``scale``; or a float array ``[]``, which may be traced.
            It multiplies ``q``, in float32.
        sliding_window, soft_cap: as ``paged_attention``'s.
        mask_value: None or at most -10000: masked positions do not enter the softmax.
        k_scale: a factor of the logits. A cache of integers needs both.
        v_scale: a factor of the output.
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: tune the TPU's kernel; not
            used.

    Returns:
        ``[max_num_batched_tokens, num_q_heads, head_dim]``, dtype of ``q``; zero for tokens of no
        sequence.

    Raises:
        ValueError, TypeError: as ``paged_attention``.
    """
    check_mask_value(OP, mask_value)
    if isinstance(sm_scale, jax.Array):  # paged_attention's scale is a constant of the program
        q, sm_scale = _scaled(q, sm_scale), 1.0
    output = paged_attention(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sm_scale if k_scale is None else sm_scale * k_scale,
        sliding_window,
        soft_cap,
        k_scale=unit_scale(kv_pages, k_scale),
        v_scale=unit_scale(kv_pages, v_scale),
    )
    return output if v_scale is None else output * v_scale


def _scaled(q: jax.Array, sm_scale: jax.Array) -> jax.Array:
    if sm_scale.shape != ():
        raise shape_error(OP, "sm_scale", "[]", sm_scale.shape, "It is one number")
    if not jnp.issubdtype(sm_scale.dtype, jnp.floating):
        remedy = "Cast sm_scale to float32"
        raise dtype_error(OP, "sm_scale", "a float dtype", sm_scale.dtype.name, remedy)
    return (q.astype(jnp.float32) * sm_scale.astype(jnp.float32)).astype(q.dtype)
