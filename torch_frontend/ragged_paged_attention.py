"""``torch.ops.xla_gpu.ragged_paged_attention``: attention alone, with the arguments of torch_xla's
operator for TPUs, which are those of the Pallas kernel in ``jax.experimental``."""

from __future__ import annotations

from typing import Any

import torch

from shared_ffi.paged_attention import check_mask_value
from torch_frontend.operator.arguments import checked
from torch_frontend.operator.define import define_composite
from torch_frontend.paged_attention import DEFAULT

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
    check_mask_value(OP, mask_value)
    scale = sm_scale if k_scale is None else sm_scale * k_scale
    metadata = (kv_lens, page_indices, cu_q_lens, num_seqs)
    # The factors are applied outside. A cache of integers has to have scales all the same.
    is_integer = kv_pages.dtype in (torch.int8, torch.uint8)
    ones = (
        q.new_ones((), dtype=torch.float32) if is_integer and factor is not None else None
        for factor in (k_scale, v_scale)
    )
    scales = dict(zip(("k_scale", "v_scale"), ones, strict=True))
    output: torch.Tensor = DEFAULT(
        q, kv_pages, *metadata, scale, sliding_window, soft_cap, **scales
    )
    return output if v_scale is None else output * v_scale


OPERATOR = define_composite(
    f"{OP}(Tensor q, Tensor kv_pages, Tensor kv_lens, Tensor page_indices, Tensor cu_q_lens, "
    "Tensor num_seqs, float sm_scale=1, SymInt? sliding_window=None, float? soft_cap=None, "
    "float? mask_value=None, float? k_scale=None, float? v_scale=None, bool use_kernel=True, "
    "int? num_kv_pages_per_block=None, int? num_queries_per_block=None, "
    "int? vmem_limit_bytes=None) -> Tensor",
    _attend,
)
_OPERATOR = checked(OP, OPERATOR)


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """``paged_attention`` with the arguments of torch_xla's ``xla::ragged_paged_attention``.

    It only attends: ``kv_cache_update`` writes the cache.

    Args:
        q: ``paged_attention``'s ``query``.
        kv_pages: its ``kv_cache``, in the default layout.
        kv_lens: its ``context_lens``.
        page_indices: its ``block_tables``.
        cu_q_lens: its ``query_start_loc``.
        num_seqs: as there.
        sm_scale: its ``scale``.
        sliding_window: as there.
        soft_cap: as there.
        mask_value: None or at most -10000: masked positions do not enter the softmax.
        k_scale: multiplies the logits. A cache of integers needs both.
        v_scale: multiplies the output.

    The arguments after ``v_scale`` tune the TPU's kernel and are not used.
    """
    operands = (q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    numbers = (sm_scale, sliding_window, soft_cap, mask_value, k_scale, v_scale)
    return _OPERATOR(*operands, *numbers)  # type: ignore[no-any-return]


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
            library.impl(OP, OPERATOR, key, allow_override=True)
        _libraries.append(library)
