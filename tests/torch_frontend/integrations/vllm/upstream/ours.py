"""What vLLM's own tests import instead of vLLM's backends and operators: ours.

`tests/torch_frontend/integrations/vllm/test_upstream.py` copies this file beside those tests. They have no other change.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
import vllm
from vllm import _custom_ops
from vllm import config as vllm_config
from vllm.v1.attention.backends import registry

from torch_frontend.integrations import vllm as integration
from torch_frontend.integrations.vllm import names

integration.register()
OPS = torch.ops.xla_gpu
FP8_DTYPES = names.FP8_DTYPES


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        return f"{name} of vLLM"  # equals no backend


class AttentionBackendEnum(metaclass=_Names):
    """Names of backends: those that the tests run anywhere are ours."""

    FLASH_ATTN = FLEX_ATTENTION = TRITON_ATTN = registry.AttentionBackendEnum.CUSTOM


def _sizes(num_heads: int, num_kv_heads: int, **others: Any) -> transformers.PretrainedConfig:
    return transformers.MistralConfig(
        architectures=["MistralForCausalLM"],
        hidden_size=4096,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=128,
        max_position_embeddings=8192,
        dtype="float16",
        **others,
    )


MODELS = {
    "meta-llama/Meta-Llama-3-8B": _sizes(32, 8, sliding_window=None),
    "microsoft/Phi-tiny-MoE-instruct": _sizes(16, 4, sliding_window=2047),
    "deepseek-ai/DeepSeek-V2-Lite": transformers.DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"],
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_attention_heads=16,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        dtype="bfloat16",
    ),
}
"""The sizes of attention in models that the tests would download."""


def ModelConfig(*, model: str, **options: Any) -> Any:
    """vLLM's class, for a model that is not downloaded."""
    with tempfile.TemporaryDirectory() as folder:
        MODELS[model].save_pretrained(folder)
        options |= {"model": folder, "tokenizer": folder, "skip_tokenizer_init": True}
        return vllm_config.ModelConfig(**options)


def LLM(*, model: str, **options: Any) -> Any:
    """vLLM's class with our attention, for a model that is not downloaded."""
    with tempfile.TemporaryDirectory() as folder:
        MODELS[model].save_pretrained(folder)
        engine = vllm.LLM(model=folder, attention_backend="CUSTOM", **options)
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert {type(x.impl) for x in layers if hasattr(x, "impl")} == {integration.XlaGpuLatentImpl}
    return engine


def mla_decode_kvcache_cpu(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """As vLLM's: a query token for each sequence, and ``[num_blocks, block_size, head_size]``."""
    OPS.paged_attention.out(
        query,
        kv_cache,
        seq_lens,
        block_tables,
        torch.arange(len(query) + 1, dtype=torch.int32),
        torch.tensor(len(query), dtype=torch.int32),
        scale,
        kv_layout="nbd",
        max_query_len=1,
        value_head_size=out.shape[-1],
        out=out,
    )


def cpu_attn_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """As vLLM's: ``[num_blocks, num_kv_heads, block_size, head_size]``, the scales numbers."""
    caches, scales = _caches(key_cache, value_cache, k_scale, v_scale, kv_cache_dtype)
    OPS.kv_cache_update(
        caches[0], key, value, slot_mapping, value_cache=caches[1], kv_layout="nhbd", **scales
    )


def cpu_attn_get_scheduler_metadata(**_: Any) -> None:
    """Ours needs no plan."""


def cpu_attention_with_kv_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: None,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """As vLLM's."""
    caches, scales = _caches(key_cache, value_cache, k_scale, v_scale, kv_cache_dtype)
    window = sliding_window if sliding_window > 0 else None
    OPS.paged_attention.out(
        query,
        caches[0],
        seq_lens,
        block_table,
        query_start_loc,
        torch.tensor(len(seq_lens), dtype=torch.int32),
        scale,
        window,
        softcap or None,
        value_cache=caches[1],
        kv_layout="nhbd",
        sinks=None if s_aux is None else s_aux.float(),
        alibi_slopes=alibi_slopes,
        causal=causal or dynamic_causal is not None,
        causal_seqs=None if dynamic_causal is None else dynamic_causal.int(),
        window_right=None if causal or window is None else window - 1,
        out=output,
        **scales,
    )


def _caches(
    key: torch.Tensor, value: torch.Tensor, k_scale: float, v_scale: float, dtype: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    if dtype == "auto":
        return [key, value], {}
    scales = {"k_scale": torch.tensor(k_scale), "v_scale": torch.tensor(v_scale)}
    return [x.view(FP8_DTYPES[dtype]) for x in (key, value)], scales


def __getattr__(name: str) -> Any:
    """All other names are vLLM's."""
    return getattr(next((x for x in (vllm_config, _custom_ops) if hasattr(x, name)), vllm), name)
