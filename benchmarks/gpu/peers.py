"""Other libraries' attention on GPUs. What only they need (contiguous or padded K and V, a plan
made on the host) is prepared beforehand and not timed."""

from __future__ import annotations

from functools import cache
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


@takes_8_bits
def flashinfer(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """FlashInfer's paged wrappers; their plan is made on the host beforehand."""
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
    scales = {} if workload.cache_dtype is None else {"k_scale": SCALE, "v_scale": SCALE}
    heads = (model.num_heads, model.num_kv_heads, model.head_size, block_size)
    if workload.cache_dtype == "int8":
        raise DoesNotApply("a cache of int8")
    if workload.kind == "decode":
        decode = peer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(indptr, indices, last, *heads, **options)
        return lambda: decode.run(query, kv, **scales)
    prefill = peer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(starts, indptr, indices, last, *heads, causal=True, **options)
    out = torch.empty_like(query)  # without it, each call fills one with zeros
    return lambda: prefill.run(query, kv, out=out, **scales)


def flash_attention_3(workload: Workload, operands: list[torch.Tensor]) -> Contestant:
    """FlashAttention-3 over pages."""
    from flash_attn_interface import flash_attn_with_kvcache  # noqa: PLC0415

    model = workload.model
    query, cache, lengths, tables, starts, _ = operands
    key, value = cache[:, :, 0::2].contiguous(), cache[:, :, 1::2].contiguous()
    tables = tables.clamp(max=len(cache) - 1)
    longest = max(q_len for q_len, _ in workload.sequences)
    return lambda: flash_attn_with_kvcache(
        query,
        key,
        value,
        cache_seqlens=lengths,
        page_table=tables,
        cu_seqlens_q=starts,
        max_seqlen_q=longest,
        causal=True,
        softmax_scale=model.attributes()["scale"],
        window_size=((model.sliding_window or 0) - 1, 0 if model.sliding_window else -1),
        softcap=model.soft_cap or 0.0,
    )


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
    "FlashAttention-3": flash_attention_3,
    "torch SDPA (contiguous)": torch_sdpa,
    "JAX cuDNN (contiguous)": jax_cudnn,
    "JAX Pallas": jax_pallas,
}
PACKAGES = ("flashinfer-python", "flash_attn_3")
