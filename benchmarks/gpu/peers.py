"""Other libraries' attention on GPUs. What only they need (contiguous or padded K and V, a plan
made on the host) is prepared beforehand and not timed.

Beside a library's fastest mode stands the one that promises the same bits in any batch: a split of
the context that follows from the sequence alone, or none. vLLM's VLLM_BATCH_INVARIANT=1 sets
num_splits=1 for FlashAttention and disable_split_kv for FlashInfer.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from benchmarks.contest import (
    Contestant,
    DoesNotApply,
    Jitted,
    Maker,
    gathered,
    takes_8_bits,
    to_jax,
    torch_sdpa,
)
from benchmarks.workloads import SCALE, Workload


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """For all of FlashInfer's wrappers, which run one after the other."""
    return torch.empty(512 << 20, dtype=torch.uint8, device=device)


def flashinfer(
    workload: Workload, operands: list[torch.Tensor], backend: str = "auto", **split: bool
) -> Contestant:
    """FlashInfer's paged wrappers; their plan is made on the host beforehand. `fixed_split_size`
    stands for vLLM's size for decoding, 2048 positions; FlashInfer counts pages."""
    import flashinfer as peer  # noqa: PLC0415

    model, block_size = workload.model, workload.block_size
    query, kv_cache, lengths, tables, starts, _ = operands
    pages = -(-lengths // block_size)
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    indices = torch.cat([row[:n] for row, n in zip(tables, pages.tolist(), strict=True)])
    last = lengths - (pages - 1) * block_size
    # Its layout: [blocks, 2, block size, kv heads, head size].
    kv = kv_cache.unflatten(2, (-1, 2)).permute(0, 3, 1, 2, 4).contiguous()
    workspace = _workspace(query.device)
    window = (model.sliding_window or 0) - 1
    options: dict[str, Any] = {
        "window_left": window,
        "logits_soft_cap": model.soft_cap or 0.0,
        "sm_scale": model.attributes()["scale"],
        "q_data_type": torch.bfloat16,
        "kv_data_type": kv_cache.dtype,
    }
    if split.get("fixed_split_size"):
        options["fixed_split_size"] = 2048 // block_size
    if split.get("disable_split_kv"):
        options["disable_split_kv"] = True
    scales = {} if workload.cache_dtype is None else {"k_scale": SCALE, "v_scale": SCALE}
    heads = (model.num_heads, model.num_kv_heads, model.head_size, block_size)
    if workload.cache_dtype == "int8":
        raise DoesNotApply("a cache of int8")
    if workload.kind == "decode":
        decode = peer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend=backend
        )
        decode.plan(indptr, indices, last, *heads, **options)
        return lambda: decode.run(query, kv, **scales)
    prefill = peer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    prefill.plan(starts, indptr, indices, last, *heads, causal=True, **options)
    out = torch.empty_like(query)  # without it, each call fills one with zeros
    return lambda: prefill.run(query, kv, out=out, **scales)


def flash_attention_3(
    workload: Workload, operands: list[torch.Tensor], num_splits: int = 0
) -> Contestant:
    """vLLM's FlashAttention 3, over pages. 0 splits: it chooses by the batch."""
    from vllm.vllm_flash_attn.flash_attn_interface import (  # noqa: PLC0415
        flash_attn_varlen_func,
    )

    model = workload.model
    query, cache, lengths, tables, starts, _ = operands
    key, value = cache[:, :, 0::2].contiguous(), cache[:, :, 1::2].contiguous()
    window = [model.sliding_window - 1, 0] if model.sliding_window else None
    return partial(
        flash_attn_varlen_func,
        query,
        key,
        value,
        max(q_len for q_len, _ in workload.sequences),
        starts,
        max(context for _, context in workload.sequences),
        seqused_k=lengths,
        block_table=tables.clamp(max=len(cache) - 1),
        causal=True,
        softmax_scale=model.attributes()["scale"],
        window_size=window,
        softcap=model.soft_cap or 0.0,
        num_splits=num_splits,
        fa_version=3,
    )


def torch_flash(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """PyTorch's own FlashAttention 2, over gathered K and V."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

    attend = torch_sdpa(workload, operands)

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend()

    return run


def jax_flash_attention_3(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """flash-attn3-jax over pages. It splits no context."""
    from flash_attn3_jax import flash_mha_with_kvcache  # noqa: PLC0415

    if len({q_len for q_len, _ in workload.sequences}) != 1:
        raise DoesNotApply("queries of several lengths")
    model = workload.model
    query, cache, lengths, tables, *_ = operands
    window = (model.sliding_window - 1, 0) if model.sliding_window else (-1, -1)

    def attend(query: Any, key: Any, value: Any, lengths: Any, tables: Any) -> Any:
        out = flash_mha_with_kvcache(
            query,
            key,
            value,
            cache_seqlens=lengths,
            page_table=tables,
            softmax_scale=model.attributes()["scale"],
            is_causal=True,
            window_size=window,
        )
        return out.reshape(-1, *out.shape[2:])

    arrays = (
        query.unflatten(0, (len(workload.sequences), -1)),
        cache[:, :, 0::2],
        cache[:, :, 1::2],
        lengths,
        tables.clamp(max=len(cache) - 1),
    )
    return Jitted(attend, *map(to_jax, arrays))


def jax_cudnn(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """jax.nn.dot_product_attention with cuDNN, over gathered K and V."""
    import jax  # noqa: PLC0415

    key, value = (x.transpose(1, 2) for x in gathered(workload, operands))
    q_len, context = workload.sequences[0]
    if q_len not in (1, context):
        raise DoesNotApply("causal attention of a chunk")
    scale = workload.model.attributes()["scale"]

    def attend(query: Any, key: Any, value: Any) -> Any:
        out = jax.nn.dot_product_attention(
            query, key, value, is_causal=q_len > 1, scale=scale, implementation="cudnn"
        )
        return out.reshape(-1, *out.shape[2:])

    return Jitted(attend, *map(to_jax, (operands[0].unflatten(0, (-1, q_len)), key, value)))


def jax_pallas(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """JAX's Pallas paged_attention for GPUs, for decode only."""
    from jax.experimental.pallas.ops.gpu import paged_attention as peer  # noqa: PLC0415

    if workload.kind != "decode" or workload.model.sliding_window:
        raise DoesNotApply("anything but decoding without a window")
    query, cache, lengths, tables, *_ = operands
    scale, cap = workload.model.attributes()["scale"], workload.model.soft_cap
    pages = [cache[:, :, first::2].permute(2, 0, 1, 3) for first in (0, 1)]
    tables = tables.clamp(max=len(cache) - 1)

    def attend(query: Any, key: Any, value: Any, tables: Any, lengths: Any) -> Any:
        return peer.paged_attention(
            query * scale, key, value, tables, lengths, attn_logits_soft_cap=cap
        )

    return Jitted(attend, *map(to_jax, (query, *pages, tables, lengths)))


PEERS: dict[str, Maker] = {
    "FlashInfer": flashinfer,
    "FlashInfer, fixed_split_size": partial(flashinfer, fixed_split_size=True),
    "FlashInfer, disable_split_kv": partial(flashinfer, disable_split_kv=True),
    "FlashInfer, fa2": partial(flashinfer, backend="fa2"),
    "FlashAttention-3": flash_attention_3,
    "FlashAttention-3, num_splits=1": partial(flash_attention_3, num_splits=1),
    "torch SDPA (contiguous)": torch_sdpa,
    "torch SDPA, FlashAttention-2 (contiguous)": torch_flash,
    "flash-attn3-jax": jax_flash_attention_3,
    "JAX cuDNN (contiguous)": jax_cudnn,
    "JAX Pallas": jax_pallas,
}
for name, make in PEERS.items():
    if name.startswith("FlashInfer"):
        takes_8_bits(make)

# Beside each library's fastest mode, the modes with the same bits in any batch.
BATCH_INVARIANT = {
    "FlashInfer": ("FlashInfer, fixed_split_size", "FlashInfer, disable_split_kv"),
    "FlashAttention-3": ("FlashAttention-3, num_splits=1",),
    "flash-attn3-jax": ("flash-attn3-jax",),
}
PACKAGES = ("flashinfer-python", "vllm", "flash-attn3-jax")
