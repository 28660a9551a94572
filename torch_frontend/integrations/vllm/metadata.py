"""The arguments of the ops that the layers of a group share in a step, made from vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
from vllm.v1.attention import backend as _vllm
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from torch_frontend.integrations.vllm.names import NAME, REMEDY, description, unsupported

if TYPE_CHECKING:

    class _Metadata: ...

    class _MetadataBuilder:
        kv_cache_spec: Any
        layer_names: list[str]
        vllm_config: Any
        device: torch.device

        def __init__(self, *arguments: Any) -> None: ...

else:
    _Metadata = _vllm.AttentionMetadata
    _MetadataBuilder = _vllm.AttentionMetadataBuilder

_LOGGER = init_logger(f"vllm.{__name__}")  # under vLLM's own, which decides what is shown
# vLLM says by the type of its description how a layer attends: others than these have a mask of
# their own (reference windows, sinks that are keys, encoders).
_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
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


@dataclass
class Shard:
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
    shard: Shard | None = None
    slot_mapping: torch.Tensor | None = None
    """Not used here: vLLM hands it over with the keys. Its tests look for it."""


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
            raise unsupported(f"a {type(spec).__name__}")
        value = self._head_size_v()
        if spec.head_size_v != value or spec.tokens_per_state != 1:
            raise NotImplementedError(
                f"{NAME}: head_size_v must be {value} and tokens_per_state 1; "
                f"got {spec.head_size_v} and {spec.tokens_per_state}{REMEDY}"
            )
        if self._num_shards > 1 and getattr(spec, "attention_chunk_size", None) is not None:
            raise unsupported("decode context parallelism with chunked attention")
        for name in self.layer_names:
            layer = self.vllm_config.compilation_config.static_forward_context.get(name)
            for attribute in _REFUSED_OF_LAYERS:
                if getattr(layer, attribute, None) is not None:
                    raise unsupported(f"{attribute} of the layer {name}")

    def _head_size_v(self) -> int:
        """What vLLM's description of the cache must say."""
        size: int = self.kv_cache_spec.head_size
        return size

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
                raise unsupported(name)
        causal, causal_seqs = common.causal, None
        if isinstance(causal, torch.Tensor):
            causal_seqs = self._copied("causal", causal, self._max_seqs)
            causal = False
        ranges = ranges_in_window = None
        if common.mm_req_doc_ranges:
            if self._num_shards > 1:
                raise unsupported("decode context parallelism with images")
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

    def _shard(self, common: Any) -> Shard:
        starts = common.query_start_loc
        query_lens = starts.diff()
        positions = torch.arange(common.max_query_len, dtype=torch.int32, device=starts.device)
        return Shard(
            context_lens=get_dcp_local_seq_lens(
                common.seq_lens - query_lens,
                self._num_shards,
                get_dcp_group().rank_in_group,
                self._interleave,
            ),
            query_lens=query_lens,
            query_tables=starts[:-1, None] + positions,
        )


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
