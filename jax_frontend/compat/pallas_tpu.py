"""The names of ``jax.experimental.pallas.ops.tpu``: ``paged_attention``, and version 2 of
``ragged_paged_attention``."""

from __future__ import annotations

from typing import Any

import jax

from jax_frontend._call import takes_arrays
from jax_frontend.compat._common import decode
from jax_frontend.compat.tpu_inference import ragged_paged_attention_v2
from shared_ffi.spec import shape_error

__all__ = ["paged_attention", "ragged_paged_attention"]

OP = "pallas_tpu.paged_attention"

# What a scale of QuantizedTensor is divided by: the largest element is stored as 127.5, rounded.
_MAX_INT8 = 127.5

ragged_paged_attention = ragged_paged_attention_v2


@takes_arrays(OP)
def paged_attention(
    q: jax.Array,
    k_pages: Any,
    v_pages: Any,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    mask_value: float | None = None,
    attn_logits_soft_cap: float | None = None,
    pages_per_compute_block: int | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
) -> jax.Array:
    """Attention of one query token of each sequence over a paged cache. Logits are not scaled.

    Args:
        q: ``[batch_size, num_q_heads, head_dim]``, float32, float16 or bfloat16.
        k_pages: ``[num_kv_heads, total_num_pages, page_size, head_dim]``, dtype of ``q``; or the
            ``QuantizedTensor`` of ``quantization_utils``, with ``weight`` int8 of this shape and
            ``scales`` ``[num_kv_heads, total_num_pages, page_size, 1]``. The scales are transposed
            in each call.
        v_pages: as ``k_pages``.
        lengths: ``[batch_size]`` int32. 0 is an inactive slot, whose output is zero.
        page_indices: ``[batch_size, pages_per_sequence]`` int32.
        mask_value: None or at most -10000: masked positions do not enter the softmax.
        attn_logits_soft_cap: as ``paged_attention``'s ``soft_cap``.
        pages_per_compute_block, megacore_mode, inline_seq_dim: tune the TPU's kernel; not used.

    Returns:
        ``[batch_size, num_q_heads, head_dim]``, dtype of ``q``.

    Raises:
        ValueError, TypeError: as ``paged_attention``.
    """
    k_pages, k_scale = _weight_and_scale("k_pages", k_pages)
    v_pages, v_scale = _weight_and_scale("v_pages", v_pages)
    return decode(
        OP,
        q,
        k_pages,
        v_pages,
        lengths,
        page_indices,
        soft_cap=attn_logits_soft_cap,
        mask_value=mask_value,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _weight_and_scale(name: str, pages: Any) -> tuple[jax.Array, jax.Array | None]:
    if not hasattr(pages, "weight"):
        return pages, None
    shape = (*pages.weight.shape[:-1], 1)
    if pages.scales.shape != shape:
        remedy = "It has a scale for each row of weight"
        raise shape_error(OP, f"{name}.scales", str(list(shape)), pages.scales.shape, remedy)
    return pages.weight, pages.scales[..., 0].astype("float32") / _MAX_INT8
