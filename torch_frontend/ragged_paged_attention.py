"""``torch.ops.xla_gpu.ragged_paged_attention``: attention alone, with the arguments of torch_xla's
operator for TPUs, which are those of the Pallas kernel in ``jax.experimental``."""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend._define import define_composite
from torch_frontend.paged_attention import paged_attention

OP = "ragged_paged_attention"


def _attend(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    sm_scale: float = 1,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *tuning: Any,
) -> torch.Tensor:
    scale = sm_scale if k_scale is None else sm_scale * k_scale
    metadata = (kv_lens, page_indices, cu_q_lens, num_seqs)
    output: torch.Tensor = paged_attention(q, kv_pages, *metadata, scale, sliding_window, soft_cap)
    return output if v_scale is None else output * v_scale


ragged_paged_attention: torch._ops.OpOverload = define_composite(
    f"{OP}(Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, Tensor cu_q_lens, "
    "Tensor num_seqs, float sm_scale=1, SymInt? sliding_window=None, float? soft_cap=None, "
    "float? mask_value=None, float? k_scale=None, float? v_scale=None, bool use_kernel=True, "
    "int? num_kv_pages_per_block=None, int? num_queries_per_block=None, "
    "int? vmem_limit_bytes=None) -> Tensor",
    _attend,
)
"""``paged_attention`` with the arguments of torch_xla's ``xla::ragged_paged_attention``. It only
attends: ``kv_cache_update`` writes the cache.

``kv_pages`` has the default layout. ``k_scale`` multiplies the logits, ``v_scale`` the output.
``mask_value`` and the arguments after ``v_scale`` tune the TPU's kernel and are ignored.
"""

_libraries: list[torch.library.Library] = []


def replace_tpu_kernels() -> None:
    """Makes ``torch.ops.xla.ragged_paged_attention`` run on CPU, CUDA and XLA tensors in this
    process, for code that calls it: torch_xla has it for TPUs only.

    Raises:
        RuntimeError: torch_xla has not defined the operator yet.
    """
    if not hasattr(torch.ops.xla, OP):
        raise RuntimeError(
            f"replace_tpu_kernels: torch.ops.xla.{OP} is not defined yet; "
            "import torch_xla.experimental.custom_kernel before"
        )
    if not _libraries:
        library = torch.library.Library("xla", "IMPL")
        for key in ("CPU", "CUDA", "XLA"):
            library.impl(OP, ragged_paged_attention, key, allow_override=True)
        _libraries.append(library)
