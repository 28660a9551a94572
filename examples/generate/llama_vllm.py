"""The Llama of `llama_torch` with vLLM's attention layers, on torch_xla's device.

The layers are those that vLLM makes for this library. Caches have the shape of vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared_ffi.batch import Batch
from torch_frontend.integrations.vllm import XlaGpuAttentionImpl, XlaGpuMetadata
from xla_paged_attention.engine.llama_torch import Llama, Rope, rotated
from xla_paged_attention.engine.model import Config


class VllmLlama(Llama):
    """The model. See Llama."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        super().__init__(config, weights)
        layer: Any
        for layer, window in zip(self.layers, config.sliding_windows, strict=True):
            attention = XlaGpuAttentionImpl(
                config.num_heads,
                config.head_size,
                config.head_size**-0.5,
                num_kv_heads=config.num_kv_heads,
                sliding_window=window,
            )
            layer.self_attn.attend = partial(_attend, attention)

    def new_caches(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """An empty cache for each layer, ``[num_blocks, num_kv_heads, block_size,
        2 * head_size]``, with the weights' dtype and on their device."""
        shape = (num_blocks, self.config.num_kv_heads, block_size, 2 * self.config.head_size)
        return [self.embed_tokens.weight.new_zeros(shape) for _ in self.layers]


def _attend(
    attention: XlaGpuAttentionImpl,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: Rope,
    cache: Tensor,
    batch: Batch,
) -> Tensor:
    """As vLLM calls a layer's attention: with rotated queries and keys."""
    query, key = rotated(query, key, rope)
    step = XlaGpuMetadata(
        num_actual_tokens=len(query),  # of padding, too: another number would be another program
        context_lens=batch.context_lens,
        block_tables=batch.block_tables,
        query_start_loc=batch.query_start_loc,
        num_seqs=batch.num_seqs,
        max_query_len=None,
        causal=True,
    )
    attention.do_kv_cache_update(None, key, value, cache, batch.slot_mapping)
    output = torch.empty_like(query)
    attended: Tensor = attention.forward(None, query, key, value, cache, step, output=output)
    return attended
