"""Latent attention (MLA) of a layer, and what vLLM asks before it chooses that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention import backend as _vllm
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

from torch_frontend.integrations.vllm.attention import (
    LayerAttention,
    XlaGpuAttentionBackend,
    first_rows,
)
from torch_frontend.integrations.vllm.metadata import XlaGpuMetadata, XlaGpuMetadataBuilder
from torch_frontend.integrations.vllm.names import (
    DTYPES_WITH_SCALES,
    LATENT_NAME,
    OPS,
    unsupported,
)

if TYPE_CHECKING:

    class _LatentImpl: ...

else:
    _LatentImpl = _vllm.MLAAttentionImpl


class XlaGpuLatentBackend(XlaGpuAttentionBackend):
    """What vLLM asks before it chooses a backend for latent attention (MLA)."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        x for x in XlaGpuAttentionBackend.supported_kv_cache_dtypes if x not in DTYPES_WITH_SCALES
    ]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM shows."""
        return LATENT_NAME

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The class of a layer's attention."""
        return XlaGpuLatentImpl

    @staticmethod
    def get_builder_cls() -> type[XlaGpuLatentBuilder]:
        """The class that makes the arguments which layers share."""
        return XlaGpuLatentBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """Keys and values are parts of one latent vector."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """No sinks: no layer of vLLM hands them over."""
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        """No decode context parallelism."""
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        """No prefill context parallelism."""
        return False


class XlaGpuLatentMetadata(XlaGpuMetadata):
    """As vLLM divides a batch for latent attention: all tokens attend to latents, as it has them
    do in decoding. So a prompt's new tokens and those in its cache are read by one call."""

    num_prefills = 0
    prefill = None

    @property
    def num_decodes(self) -> int:
        """All sequences."""
        return len(self.context_lens)

    @property
    def num_decode_tokens(self) -> int:
        """All tokens."""
        return self.num_actual_tokens

    @property
    def decode(self) -> XlaGpuLatentMetadata:
        """The arguments of `num_decode_tokens`."""
        return self


class XlaGpuLatentBuilder(XlaGpuMetadataBuilder):
    """Makes the arguments of the ops for latent attention."""

    _metadata = XlaGpuLatentMetadata
    _specs = (MLAAttentionSpec, SlidingWindowMLASpec)

    def _head_size_v(self) -> int:
        """V is no row of its own."""
        return 0


class XlaGpuLatentImpl(LayerAttention, _LatentImpl):
    """The latent attention (MLA) of a layer, where vLLM has multiplied the queries with the weights
    of the keys and multiplies the output with those of the values.

    Args:
        kv_lora_rank: how many numbers of a cached row are V.
        q_lora_rank: not used; nor are the other sizes of the model and `kv_b_proj`.
        indexer: must be None.
        q_pad_num_heads: must be None.
        others: those of other attention.

    Raises:
        NotImplementedError: decode context parallelism, chosen positions, or what other attention
            refuses.
    """

    _backend = XlaGpuLatentBackend
    _kv_layout = "nbd"
    _value_head_size: int

    def __init__(
        self,
        *args: Any,
        kv_lora_rank: int,
        q_lora_rank: int | None,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: Any = None,
        q_pad_num_heads: int | None = None,
        **others: Any,
    ) -> None:
        for name, given in {"indexer": indexer, "q_pad_num_heads": q_pad_num_heads}.items():
            if given is not None:
                others[name] = given
        super().__init__(*args, **others)
        if self.dcp_world_size > 1:
            raise unsupported("decode context parallelism with MLA")
        self._value_head_size = kv_lora_rank

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Writes new rows into the cache, in place.

        Args:
            kv_c_normed: ``[num_tokens, kv_lora_rank]``: the latents.
            k_pe: ``[num_tokens, 1, qk_rope_head_dim]``: the rotated part of the keys.
            kv_cache: ``[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]``.
            slot_mapping: ``[at most num_tokens]`` int64; a negative slot is padding.
            kv_cache_dtype: as at the start.
            k_scale: of an fp8 cache.
        """
        num_tokens = len(slot_mapping)
        latent, rotated = (first_rows(num_tokens, x) for x in (kv_c_normed, k_pe))
        key = torch.cat([latent[:, None], rotated], -1)
        OPS.kv_cache_update.default(
            self._typed(kv_cache),
            key,
            key[..., :0],
            slot_mapping,
            kv_layout=self._kv_layout,
            k_scale=None if self._fp8 is None else k_scale,
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: XlaGpuLatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attends to the cache.

        Args:
            q: ``[num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim]``, or its two parts.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]``.
            attn_metadata: has the number of tokens.
            layer: has the scale of an fp8 cache.

        Returns:
            ``[num_tokens, num_heads, kv_lora_rank]``, and None: vLLM needs no log-sum-exp.
        """
        query = q if isinstance(q, torch.Tensor) else torch.cat(q, -1)
        output = query.new_empty(*query.shape[:2], self._value_head_size)
        self._attend(layer, query, kv_c_and_k_pe_cache, attn_metadata, output)
        return output, None
