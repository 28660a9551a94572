"""A layer's attention to keys and values, and what vLLM asks before it chooses that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention import backend as _vllm
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from shared_ffi.paged_attention import MAX_HEAD_SIZE
from torch_frontend import merge_attention
from torch_frontend.integrations.vllm.metadata import Shard, XlaGpuMetadata, XlaGpuMetadataBuilder
from torch_frontend.integrations.vllm.names import (
    DTYPES_WITH_SCALES,
    FP8_DTYPES,
    OPS,
    SCALE_BYTES,
    unsupported,
)

if TYPE_CHECKING:  # the types are to be known where vLLM is not installed, too

    class _Backend: ...

    class _ImplBase:
        dcp_world_size: int
        dcp_rank: int
        pcp_world_size: int

    class _Impl(_ImplBase): ...

else:
    _Backend = _vllm.AttentionBackend
    _ImplBase = _vllm.AttentionImplBase
    _Impl = _vllm.AttentionImpl


class XlaGpuAttentionBackend(_Backend):
    """What vLLM asks before it chooses a backend."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        *FP8_DTYPES,
        *DTYPES_WITH_SCALES,
    ]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM looks up in its list of backends."""
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type[XlaGpuAttentionImpl]:
        """The class of a layer's attention."""
        return XlaGpuAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[XlaGpuMetadataBuilder]:
        """The class that makes the arguments which layers share."""
        return XlaGpuMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any head size up to the ops' largest."""
        return 1 <= head_size <= MAX_HEAD_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """All of vLLM's layouts; those with a head's keys side by side come first."""
        preferred = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
        return (*preferred, *[x for x in KVCacheLayout if x not in preferred])

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        """Why these do not go together; None if they do. Keys of 16 bits have the model's dtype."""
        if kv_cache_dtype in DTYPES_WITH_SCALES:
            reason = f"head_size {head_size}, no multiple of 4, not supported for {kv_cache_dtype}"
            return reason if head_size % 4 else None
        fits = kv_cache_dtype in (None, "auto", *FP8_DTYPES, str(dtype).removeprefix("torch."))
        return None if fits else f"kv_cache_dtype {kv_cache_dtype} not supported for {dtype}"

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Adds the scales of a row to what vLLM knows of its size, as its Triton backend does."""
        if not spec.kv_quant_mode.is_per_token_head or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=2 * (spec.head_size + SCALE_BYTES))

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks, as gpt-oss has them."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows, which may differ between layers."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Attention to all tokens of a sequence."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Image tokens that attend to each other."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A scale for each kv head of an fp8 cache."""
        return True

    @classmethod
    def supports_dcp(cls) -> bool:
        """Decode context parallelism."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A sequence's output does not depend on the batch it is in."""
        return True


class LayerAttention(_ImplBase):
    """The attention of a layer.

    Args:
        num_heads: of the query.
        head_size: of keys and values.
        scale: factor of ``q . k``.
        num_kv_heads: None: as `num_heads`.
        alibi_slopes: one for each head.
        sliding_window: the number of tokens that a token attends to, itself included.
        kv_cache_dtype: "auto" for the model's, or another that the backend supports.
        logits_soft_cap: None or 0: no cap.
        attn_type: must be that of a decoder.
        kv_sharing_target_layer_name: of the layer whose cache this one reads.
        sinks: ``[num_heads]``, of any floating-point dtype.
        chunk_lookback: must be -1.
        others: refused.

    Raises:
        NotImplementedError: the attention of an encoder or to one, a cache of another dtype,
            decode context parallelism with a window, ALiBi or sinks, prefill context parallelism,
            or an argument that is not known here.
    """

    _backend: type[XlaGpuAttentionBackend] = XlaGpuAttentionBackend
    _kv_layout: str
    _value_head_size: int | None = None  # if V is the first part of K

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        chunk_lookback: int = -1,
        **others: Any,
    ) -> None:
        if chunk_lookback != -1:
            others = {"chunk_lookback": chunk_lookback, **others}
        for name, given in others.items():
            raise unsupported(f"{name}={given!r}")
        backend: Any = self._backend
        if not backend.supports_attn_type(attn_type):
            raise unsupported(f"attention type {attn_type}")
        if not backend.supports_kv_cache_dtype(kv_cache_dtype):
            raise unsupported(f"kv_cache_dtype {kv_cache_dtype}")
        if self.pcp_world_size > 1:
            raise unsupported("prefill context parallelism")
        features = {"a window": sliding_window, "ALiBi": alibi_slopes, "sinks": sinks}
        for feature, given in features.items():
            if self.dcp_world_size > 1 and given is not None:
                raise unsupported(f"decode context parallelism with {feature}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale: float = float(scale)
        self.num_kv_heads: int = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks: torch.Tensor | None = sinks
        self._options = (self.scale, sliding_window, logits_soft_cap or None)
        # Without causality a window has two sides of one length, as in vLLM's own backends.
        self._window_right = None if sliding_window is None else sliding_window - 1
        self._fp8 = FP8_DTYPES.get(kv_cache_dtype)
        self._with_scales = DTYPES_WITH_SCALES.get(kv_cache_dtype)
        self._features: dict[str, torch.Tensor] = {}
        if alibi_slopes is not None:
            # The layer's device is not known before `forward`.
            self._features["alibi_slopes"] = torch.tensor(
                alibi_slopes, dtype=torch.float32, device="cpu"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Converts the sinks, a weight of the model, for the ops."""
        if self.sinks is not None:
            self._features["sinks"] = self.sinks.detach().float()

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: XlaGpuMetadata,
        output: torch.Tensor,
    ) -> None:
        ranges = step.ranges
        if ranges is not None and getattr(layer, "mm_prefix_clamp_sliding_window", False):
            ranges = step.ranges_in_window
        cache, options = self._cached(layer, kv_cache)
        OPS.paged_attention.out(  # by its name, as PyTorch tries one overload after the other
            query,
            cache,
            step.context_lens,
            step.block_tables,
            step.query_start_loc,
            step.num_seqs,
            *self._options,
            causal=step.causal,
            causal_seqs=step.causal_seqs,
            window_right=None if step.causal else self._window_right,
            bidirectional_ranges=ranges,
            max_query_len=step.max_query_len,
            value_head_size=self._value_head_size,
            out=output,
            **self._features,
            **options,
        )

    def _cached(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """The cache as the ops take it, and the arguments that describe it."""
        options: dict[str, Any] = {"kv_layout": self._kv_layout}
        if self._fp8 is not None:
            options["k_scale"] = layer._k_scale
            if self._value_head_size is None:
                options["v_scale"] = layer._v_scale
        return self._typed(kv_cache), options

    def _typed(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """vLLM's tensors are bytes where the cache is fp8."""
        return kv_cache if self._fp8 is None else kv_cache.view(self._fp8)


class XlaGpuAttentionImpl(LayerAttention, _Impl):
    """Attention to keys and values in one cache, side by side."""

    can_return_lse_for_decode = True  # for decode context parallelism
    _kv_layout = "nhb(2d)"

    def _cached(self, layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        if self._with_scales is None:
            return super()._cached(layer, kv_cache)
        halves = kv_cache.chunk(2, -1)
        cache, values = (x[..., : self.head_size].view(self._with_scales) for x in halves)
        k_scale, v_scale = (
            x[..., self.head_size :].view(torch.float32).squeeze(-1).mT for x in halves
        )
        options = {"k_scale": k_scale, "v_scale": v_scale}
        return cache, options | {"value_cache": values, "kv_layout": "nhbd"}

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes new keys and values into the cache, in place.

        Args:
            layer: has the scales of an fp8 cache.
            key: ``[num_tokens, num_kv_heads, head_size]``.
            value: as `key`.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, or, with scales for
                each token and head, ``[..., 2 * (head_size + 4)]``.
            slot_mapping: ``[at most num_tokens]`` int64; a negative slot is padding.
        """
        names = OPS.kv_cache_update
        update = names.default if self._with_scales is None else names.with_scales
        self._update(update, layer, (key, value), kv_cache, slot_mapping)

    def _update(
        self,
        update: Any,
        layer: Any,
        rows: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        **others: Any,
    ) -> None:
        cache, options = self._cached(layer, kv_cache)
        if self._with_scales is not None:
            for name in ("k_scale", "v_scale"):
                options[f"{name}_cache"] = options.pop(name)
        key, value = (first_rows(len(slot_mapping), x) for x in rows)
        update(cache, key, value, slot_mapping, **options, **others)

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """Whether `do_qk_norm_rope_kvcache_update` does all that this layer needs. Decode context
        parallelism reads the new keys, too."""
        return self.dcp_world_size == 1

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: torch.Tensor,
        q_out: torch.Tensor,
        k_out: torch.Tensor,
        positions: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        rms_norm_eps: float,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Normalizes and rotates queries and keys, and writes keys and values into the cache, in
        one call. A norm rounds as vLLM's does: to the dtype of its weights before they multiply.

        Args:
            layer: as in `do_kv_cache_update`.
            qkv: ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_size]``.
            q_out: ``num_tokens * num_heads * head_size`` elements; written to.
            k_out: not written to, as `forward` reads the keys from the cache.
            positions: ``[num_tokens]``.
            q_weight: ``[head_size]``.
            k_weight: ``[head_size]``.
            rms_norm_eps: what is added to the mean of squares.
            cos_sin_cache: ``[max_positions, rotary_dim]``.
            is_neox: whether numbers i and i + rotary_dim / 2 of a head are a pair.
            kv_cache: as in `do_kv_cache_update`.
            layer_slot_mapping: as there.
        """
        num_tokens, num_heads = len(layer_slot_mapping), self.num_heads
        heads = first_rows(num_tokens, qkv).view(num_tokens, -1, self.head_size)
        query, key, value = heads.split([num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        out = q_out.view(-1, num_heads, self.head_size)[:num_tokens]
        out.copy_(query)
        self._update(
            OPS.kv_cache_update.full,
            layer,
            (key, value),
            kv_cache,
            layer_slot_mapping,
            query=out,
            positions=first_rows(num_tokens, positions),
            cos_sin_cache=cos_sin_cache,
            interleaved=not is_neox,
            q_norm=q_weight,
            k_norm=k_weight,
            norm_eps=rms_norm_eps,
            norm_round_first=q_weight.dtype == qkv.dtype,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: XlaGpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends to the cache.

        Args:
            layer: has the scales of an fp8 cache.
            query: ``[num_tokens, num_heads, head_size]``.
            key: `[num_tokens, num_kv_heads, head_size]`; used under decode context parallelism
                only, as the cache has the new keys already.
            value: as `key`.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
            attn_metadata: None while vLLM measures its memory; nothing is computed then.
            output: as `query`; written to.
            output_scale: must be None.
            output_block_scale: must be None.

        Returns:
            `output`.

        Raises:
            NotImplementedError: the output is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise unsupported("quantized outputs")
        slopes = self._features.get("alibi_slopes")
        if slopes is not None and slopes.device != query.device:
            # vLLM measures its memory before it captures CUDA graphs, which cannot have this copy.
            self._features["alibi_slopes"] = slopes.to(query.device)
        if attn_metadata is None:
            return output
        step, num_tokens = attn_metadata, attn_metadata.num_actual_tokens
        if step.shard is not None:
            query, key, value = (first_rows(num_tokens, x) for x in (query, key, value))
            merged = self._merged(layer, query, key, value, kv_cache, step, step.shard)
            first_rows(num_tokens, output).copy_(merged)
            return output
        query, output_rows = (first_rows(num_tokens, x) for x in (query, output))
        self._attend(layer, query, kv_cache, step, output_rows)
        return output

    def _merged(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        step: XlaGpuMetadata,
        shard: Shard,
    ) -> torch.Tensor:
        """Attention to the new tokens and to each process's part of the cache. A process computes
        its part for the heads of all."""
        group: Any = get_dcp_group()
        sequences = (step.query_start_loc, step.num_seqs)
        cache, options = self._cached(layer, kv_cache)
        part = OPS.paged_attention.lse(
            group.all_gather(query.contiguous(), dim=1),
            cache,
            shard.context_lens,
            step.block_tables,
            *sequences,
            *self._options,
            causal=False,
            max_query_len=step.max_query_len,
            **options,
        )
        first = self.dcp_rank * self.num_heads
        heads = slice(first, first + self.num_heads)
        outputs, lses = (group.all_gather(x[None], dim=0)[:, :, heads] for x in part)
        output, lse = OPS.paged_attention.lse(
            query,
            key,
            shard.query_lens,
            shard.query_tables,
            *sequences,
            *self._options,
            value_cache=value,
            kv_layout="nhd",
            causal=step.causal,
            causal_seqs=step.causal_seqs,
            max_query_len=step.max_query_len,
        )
        return merge_attention([*outputs, output], [*lses, lse])[0]


def first_rows(count: int, rows: torch.Tensor) -> torch.Tensor:
    """The rows before the padding. A slice takes as long as a tenth of a call."""
    return rows if len(rows) == count else rows[:count]
