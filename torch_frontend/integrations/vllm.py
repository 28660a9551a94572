"""vLLM's attention on these ops: ``vllm serve MODEL --attention-backend XLA_GPU``, or ``CUSTOM``.

vLLM calls `register` in each of its processes, because the package names it as an entry point in
the group ``vllm.general_plugins``. The cache of a layer is vLLM's own tensor, ``[num_blocks,
num_kv_heads, block_size, 2 * head_size]`` with strides of vLLM's choice; for latent attention (MLA)
``[num_blocks, block_size, head_size]``. The ops write and read it where it lies.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from shared_ffi import _native
from shared_ffi.paged_attention import MAX_HEAD_SIZE
from torch_frontend import merge_attention
from torch_frontend.integrations._versions import require

require("vllm", "0.32", "0.33")

from vllm.distributed.parallel_state import get_dcp_group  # noqa: E402
from vllm.logger import init_logger  # noqa: E402
from vllm.v1.attention import backend as _vllm  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend  # noqa: E402
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

if TYPE_CHECKING:  # the types are to be known where vLLM is not installed, too

    class _Base:
        device: torch.device

        def __init__(self, *arguments: Any) -> None: ...

    class _Backend(_Base): ...

    class _Metadata(_Base): ...

    class _MetadataBuilder(_Base):
        kv_cache_spec: Any
        layer_names: list[str]
        vllm_config: Any

    class _ImplBase(_Base):
        dcp_world_size: int
        dcp_rank: int
        pcp_world_size: int

    class _Impl(_ImplBase): ...

    class _LatentImpl(_ImplBase): ...

else:
    _Backend = _vllm.AttentionBackend
    _Metadata = _vllm.AttentionMetadata
    _MetadataBuilder = _vllm.AttentionMetadataBuilder
    _ImplBase = _vllm.AttentionImplBase
    _Impl = _vllm.AttentionImpl
    _LatentImpl = _vllm.MLAAttentionImpl

_LOGGER = init_logger(f"vllm.{__name__}")  # under vLLM's own, which decides what is shown
_NAME = "xla_gpu"
_NAMES = ("CUSTOM", "XLA_GPU")
_LATENT_NAME = "XLA_GPU_MLA"
_OPS = torch.ops.xla_gpu
_REMEDY = "; leave out --attention-backend for vLLM's own attention"
_FP8_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_SCALE_BYTES = 4
# A row of these is K, its scale, V and its scale. The scales are float32.
_DTYPES_WITH_SCALES = {
    "int8_per_token_head": torch.int8,
    "fp8_per_token_head": torch.float8_e4m3fn,
}
# vLLM says by the type of its description how a layer attends: others than these have a mask of
# their own (reference windows, sinks that are keys, encoders).
_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
_LATENT_SPECS = (MLAAttentionSpec, SlidingWindowMLASpec)
# What a batch may say: used here, or of no effect on these layers.
_KNOWN_FIELDS = (
    "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len "
    "max_seq_len block_table_tensor slot_mapping causal logits_indices_padded num_logits_indices "
    "max_logits_per_req encoder_seq_lens encoder_seq_lens_cpu dcp_local_seq_lens "
    "dcp_local_seq_lens_cpu_upper_bound positions is_prefilling seq_lens_cpu_upper_bound req_idx "
    "mm_req_doc_ranges replayssm_decode_base_cpu _num_computed_tokens_cache "
    "_token_to_req_indices_cache"
)
_REFUSED_FIELDS = sorted(
    {x.name for x in fields(_vllm.CommonAttentionMetadata)} - {*_KNOWN_FIELDS.split()}
)
_REFUSED_OF_LAYERS = ("logical_mask_mod", "block_sparsity_hint")  # masks for FlexAttention


def register() -> None:
    """Makes ``XLA_GPU`` and ``CUSTOM`` names of this backend, on CUDA and on the CPU, and
    ``XLA_GPU_MLA`` that of its latent attention, which the CPU knows by all three names."""
    members: Any = AttentionBackendEnum.__members__
    for name in (*_NAMES, _LATENT_NAME):
        backend = XlaGpuLatentBackend if name == _LATENT_NAME else XlaGpuAttentionBackend
        register_backend(members.get(name, name), f"{backend.__module__}.{backend.__qualname__}")
        if name != "CUSTOM":  # vLLM sends the choice to a process that has not called this yet
            members[name].__reduce_ex__ = lambda _, name=name: (_registered, (name,))
    _accept_names_on_cpu()


def _registered(name: str) -> Any:
    register()
    return AttentionBackendEnum[name]


def description(device: torch.device) -> str:
    """What attends on a device: "xla-paged-attention 0.1.0, avx2", for logs."""
    version = importlib.metadata.version("xla-paged-attention")
    kernels = "CUDA" if device.type == "cuda" else _native.cpu_instruction_set()
    return f"xla-paged-attention {version}, {kernels}"


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
        *_FP8_DTYPES,
        *_DTYPES_WITH_SCALES,
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
        if kv_cache_dtype in _DTYPES_WITH_SCALES:
            reason = f"head_size {head_size}, no multiple of 4, not supported for {kv_cache_dtype}"
            return reason if head_size % 4 else None
        fits = kv_cache_dtype in (None, "auto", *_FP8_DTYPES, str(dtype).removeprefix("torch."))
        return None if fits else f"kv_cache_dtype {kv_cache_dtype} not supported for {dtype}"

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Adds the scales of a row to what vLLM knows of its size, as its Triton backend does."""
        if not spec.kv_quant_mode.is_per_token_head or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=2 * (spec.head_size + _SCALE_BYTES))

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


class XlaGpuLatentBackend(XlaGpuAttentionBackend):
    """What vLLM asks before it chooses a backend for latent attention (MLA)."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        x for x in XlaGpuAttentionBackend.supported_kv_cache_dtypes if x not in _DTYPES_WITH_SCALES
    ]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM shows."""
        return _LATENT_NAME

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


@dataclass
class _Shard:
    """What differs under decode context parallelism, where a process has a part of each sequence's
    cache. The new tokens are not read from there: each process has all of them."""

    context_lens: torch.Tensor
    """The tokens before the new ones that are in this process's cache."""
    query_lens: torch.Tensor
    query_tables: torch.Tensor
    """The number of each new token of each sequence."""


@dataclass
class XlaGpuMetadata(_Metadata):
    """The arguments of the ops that all layers of a group share in a step."""

    num_actual_tokens: int
    """The tokens after these are padding."""
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    num_seqs: torch.Tensor
    max_query_len: int | None
    causal: bool
    causal_seqs: torch.Tensor | None = None
    """Which sequences are causal, if some are and others are not."""
    ranges: torch.Tensor | None = None
    """The positions of each token's image, if the tokens of an image attend to each other."""
    ranges_in_window: torch.Tensor | None = None
    """The part of them that the window of these layers reaches."""
    shard: _Shard | None = None
    slot_mapping: torch.Tensor | None = None
    """Not used here: vLLM hands it over with the keys. Its tests look for it."""


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


class XlaGpuMetadataBuilder(_MetadataBuilder):
    """Makes the arguments of the ops from vLLM's; copies none of its tensors."""

    # Shapes alone decide what the ops launch.
    _cudagraph_support: Any = _vllm.AttentionCGSupport.ALWAYS
    _metadata: type[XlaGpuMetadata] = XlaGpuMetadata
    _specs: tuple[Any, ...] = _SPECS

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _LOGGER.info_once("attention: %s", description(device))
        parallel = vllm_config.parallel_config
        # The cache of a draft model may be whole beside the shards of its target.
        sharded = getattr(kv_cache_spec, "dcp_sharded", True)
        self._num_shards: int = parallel.decode_context_parallel_size if sharded else 1
        self._interleave = parallel.cp_kv_cache_interleave_size
        self._check_layers()
        self._window: int | None = getattr(kv_cache_spec, "sliding_window", None)
        self._max_seqs: int = vllm_config.scheduler_config.max_num_seqs
        self._max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._numbers: dict[int, torch.Tensor] = {}
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def _check_layers(self) -> None:
        """Raises NotImplementedError if layers attend in a way that is not known here."""
        spec = self.kv_cache_spec
        # Chunks are made by builders that vLLM derives from this one.
        is_chunked = type(spec) is ChunkedLocalAttentionSpec
        if type(spec) not in self._specs or (is_chunked and type(self) is XlaGpuMetadataBuilder):
            raise NotImplementedError(f"{_NAME}: a {type(spec).__name__} is not supported{_REMEDY}")
        value, rule = (
            (0, "0")
            if self._specs is _LATENT_SPECS
            else (spec.head_size, f"head_size={spec.head_size}")
        )
        if spec.head_size_v != value or spec.tokens_per_state != 1:
            raise NotImplementedError(
                f"{_NAME}: head_size_v must be {rule} and tokens_per_state 1; "
                f"got {spec.head_size_v} and {spec.tokens_per_state}{_REMEDY}"
            )
        if self._num_shards > 1 and getattr(spec, "attention_chunk_size", None) is not None:
            raise NotImplementedError(
                f"{_NAME}: decode context parallelism with chunked attention is not supported"
            )
        for name in self.layer_names:
            layer = self.vllm_config.compilation_config.static_forward_context.get(name)
            for attribute in _REFUSED_OF_LAYERS:
                if getattr(layer, attribute, None) is not None:
                    raise NotImplementedError(
                        f"{_NAME}: {attribute} of the layer {name} is not supported{_REMEDY}"
                    )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Any batch, but none under decode context parallelism, whose tables are made anew; and
        none with a prompt if images may be in it, as a graph is captured without them."""
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return _vllm.AttentionCGSupport.NEVER
        if vllm_config.model_config.is_mm_prefix_lm:
            return _vllm.AttentionCGSupport.UNIFORM_BATCH
        return cls._cudagraph_support

    def _number(self, number: int) -> torch.Tensor:
        """``[1]`` int32 on the device, the same tensor each time. On XLA, a number that is made
        there would be another program for each number."""
        if number not in self._numbers:
            tensor = torch.tensor([number], dtype=torch.int32, device="cpu")
            self._numbers[number] = tensor.to(self.device)
        return self._numbers[number]

    def _copied(self, name: str, values: torch.Tensor, usual: int) -> torch.Tensor:
        """Copies rows to int32 on the device. A CUDA graph that is replayed reads the memory that
        it read when it was captured, so a number of rows always has the same memory: up to the
        `usual` number all have one buffer. Builders that derive from this one may pass more."""
        count = len(values)
        size = max(usual, 1 << max(count - 1, 0).bit_length())
        if (name, size) not in self._buffers:
            self._buffers[name, size] = torch.empty(
                size, *values.shape[1:], dtype=torch.int32, device=self.device
            )
        return self._buffers[name, size][:count].copy_(values)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> XlaGpuMetadata:
        """Returns the arguments for a step.

        Raises:
            NotImplementedError: images under decode context parallelism, or the batch has
                something that is not known here.
        """
        common = common_attn_metadata
        for name in _REFUSED_FIELDS:
            if getattr(common, name) is not None:
                raise NotImplementedError(f"{_NAME}: {name} is not supported{_REMEDY}")
        causal, causal_seqs = common.causal, None
        if isinstance(causal, torch.Tensor):
            causal_seqs = self._copied("causal", causal, self._max_seqs)
            causal = False
        ranges = ranges_in_window = None
        if common.mm_req_doc_ranges:
            if self._num_shards > 1:
                raise NotImplementedError(
                    f"{_NAME}: decode context parallelism with images is not supported"
                )
            found = torch.from_numpy(_image_ranges(common, self._window))
            ranges = self._copied("ranges", found[0], self._max_tokens)
            ranges_in_window = self._copied("ranges in window", found[1], self._max_tokens)
        return self._metadata(
            num_actual_tokens=common.num_actual_tokens,
            context_lens=common.seq_lens,
            block_tables=common.block_table_tensor,
            query_start_loc=common.query_start_loc,
            num_seqs=self._number(common.num_reqs),
            # Only this length is exact when a CUDA graph is replayed.
            max_query_len=1 if common.max_query_len == 1 else None,
            causal=causal,
            causal_seqs=causal_seqs,
            ranges=ranges,
            ranges_in_window=ranges_in_window,
            shard=self._shard(common) if self._num_shards > 1 else None,
            slot_mapping=common.slot_mapping,
        )

    def _shard(self, common: Any) -> _Shard:
        starts = common.query_start_loc
        query_lens = starts.diff()
        positions = torch.arange(common.max_query_len, dtype=torch.int32, device=starts.device)
        return _Shard(
            context_lens=get_dcp_local_seq_lens(
                common.seq_lens - query_lens,
                self._num_shards,
                get_dcp_group().rank_in_group,
                self._interleave,
            ),
            query_lens=query_lens,
            query_tables=starts[:-1, None] + positions,
        )


class XlaGpuLatentBuilder(XlaGpuMetadataBuilder):
    """Makes the arguments of the ops for latent attention."""

    _metadata = XlaGpuLatentMetadata
    _specs = _LATENT_SPECS


class _LayerAttention(_ImplBase):
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
            raise NotImplementedError(f"{_NAME}: {name}={given!r} is not supported{_REMEDY}")
        backend: Any = self._backend
        if not backend.supports_attn_type(attn_type):
            raise NotImplementedError(f"{_NAME}: attention type {attn_type} is not supported")
        if not backend.supports_kv_cache_dtype(kv_cache_dtype):
            raise NotImplementedError(f"{_NAME}: kv_cache_dtype {kv_cache_dtype} is not supported")
        if self.pcp_world_size > 1:
            raise NotImplementedError(f"{_NAME}: prefill context parallelism is not supported")
        features = {"a window": sliding_window, "ALiBi": alibi_slopes, "sinks": sinks}
        for feature, given in features.items():
            if self.dcp_world_size > 1 and given is not None:
                raise NotImplementedError(
                    f"{_NAME}: decode context parallelism with {feature} is not supported"
                )
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
        self._fp8 = _FP8_DTYPES.get(kv_cache_dtype)
        self._with_scales = _DTYPES_WITH_SCALES.get(kv_cache_dtype)
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
        _OPS.paged_attention.out(  # by its name, as PyTorch tries one overload after the other
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


class XlaGpuAttentionImpl(_LayerAttention, _Impl):
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
        num_tokens = len(slot_mapping)
        cache, options = self._cached(layer, kv_cache)
        update = _OPS.kv_cache_update.default
        if self._with_scales is not None:
            update = _OPS.kv_cache_update.with_scales
            for name in ("k_scale", "v_scale"):
                options[f"{name}_cache"] = options.pop(name)
        update(
            cache,
            _first(num_tokens, key),
            _first(num_tokens, value),
            slot_mapping,
            **options,
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
            raise NotImplementedError(f"{_NAME}: quantized outputs are not supported")
        slopes = self._features.get("alibi_slopes")
        if slopes is not None and slopes.device != query.device:
            # vLLM measures its memory before it captures CUDA graphs, which cannot have this copy.
            self._features["alibi_slopes"] = slopes.to(query.device)
        if attn_metadata is None:
            return output
        step, num_tokens = attn_metadata, attn_metadata.num_actual_tokens
        if step.shard is not None:
            query, key, value = (_first(num_tokens, x) for x in (query, key, value))
            merged = self._merged(layer, query, key, value, kv_cache, step, step.shard)
            _first(num_tokens, output).copy_(merged)
            return output
        query, output_rows = (_first(num_tokens, x) for x in (query, output))
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
        shard: _Shard,
    ) -> torch.Tensor:
        """Attention to the new tokens and to each process's part of the cache. A process computes
        its part for the heads of all."""
        group: Any = get_dcp_group()
        sequences = (step.query_start_loc, step.num_seqs)
        cache, options = self._cached(layer, kv_cache)
        part = _OPS.paged_attention.lse(
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
        output, lse = _OPS.paged_attention.lse(
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


class XlaGpuLatentImpl(_LayerAttention, _LatentImpl):
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
            raise NotImplementedError(
                f"{_NAME}: decode context parallelism with MLA is not supported"
            )
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
        latent, rotated = (_first(num_tokens, x) for x in (kv_c_normed, k_pe))
        key = torch.cat([latent[:, None], rotated], -1)
        _OPS.kv_cache_update.default(
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


def _image_ranges(common: Any, window: int | None) -> np.ndarray:
    """The positions of the image that each token of a batch belongs to, none for other tokens; then
    the part of them that a window reaches: ``[2, num_tokens, 2]`` int32."""
    ranges = np.zeros((2, common.num_actual_tokens, 2), np.int32)
    starts = common.query_start_loc_cpu.tolist()
    for request, images in common.mm_req_doc_ranges.items():
        start, end = starts[request : request + 2]
        shift = end - int(common.seq_lens_cpu_upper_bound[request])  # from a position to its token
        for first, last in images:
            tokens = slice(max(start, first + shift), max(start, min(end, last + 1 + shift)))
            ranges[:, tokens] = first, last + 1
            if window is not None:
                reached = np.arange(tokens.start, tokens.stop) - shift - window + 1
                ranges[1, tokens, 0] = np.maximum(first, reached)
    return ranges


def _first(count: int, rows: torch.Tensor) -> torch.Tensor:
    """The rows before the padding. A slice takes as long as a tenth of a call."""
    return rows if len(rows) == count else rows[:count]


def _accept_names_on_cpu() -> None:
    """Makes vLLM's platform for the CPU obey the choice. It has one backend and takes that, or
    another for latent attention, whose limits it sets."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415  (vLLM loads one platform only)

    platform: Any = CpuPlatform
    choose_upstream, configure_upstream = (
        platform.get_attn_backend_cls,
        platform.check_and_update_config,
    )
    if hasattr(choose_upstream, "__wrapped__"):
        return

    @functools.wraps(choose_upstream)
    def choose(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if not _is_ours(selected_backend):
            return choose_upstream.__func__(cls, selected_backend, attn_selector_config, num_heads)
        if attn_selector_config.use_mla:
            selected_backend = AttentionBackendEnum[_LATENT_NAME]
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"{_NAME}: not for this model: {', '.join(reasons)}")
        return selected_backend.get_path()

    @functools.wraps(configure_upstream)
    def configure(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        attention, model = vllm_config.attention_config, vllm_config.model_config
        backend = (attention.backend_per_kind or {}).get("mla_attention", attention.backend)
        # Blocks of 16, and prompts in one piece, are what vLLM's own latent attention needs.
        block_size = cache.block_size if cache.user_specified_block_size else 128
        chosen = [
            (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
            (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
            (cache, "enable_prefix_caching", cache.enable_prefix_caching),
            (cache, "block_size", block_size),
        ]
        configure_upstream.__func__(cls, vllm_config)
        if model is not None and model.use_mla and _is_ours(backend):
            for config, name, value in chosen:
                setattr(config, name, value)

    platform.get_attn_backend_cls = classmethod(choose)
    platform.check_and_update_config = classmethod(configure)


def _is_ours(backend: Any) -> bool:
    return backend is not None and backend.name in (*_NAMES, _LATENT_NAME)
