"""Norms and rotary embedding of an attention module, in the call that writes a paged cache.

A module of a known class runs its own ``forward``, in which norms and rotation return what they
get. ``attention`` gets queries and keys as they were projected, and the cache update does the rest.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import FunctionType
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from torch_frontend.integrations.transformers.norms import has_known_norms, norm_arguments, norms_of
from torch_frontend.integrations.transformers.paged_cache import copies_cache
from torch_frontend.integrations.transformers.shared import NAME

CLASSES = frozenset(
    {
        *("AfmoeAttention", "ApertusAttention", "Dots1Attention", "Exaone4Attention"),
        *("ExaoneMoeAttention", "FlexOlmoAttention", "FlintAttention", "Gemma3Attention"),
        *("Gemma3nTextAttention", "Gemma4TextAttention", "Gemma4UnifiedTextAttention"),
        "Glm4MoeAttention",
        *("HunYuanDenseV1Attention", "HunYuanMoEV1Attention", "HYV3Attention"),
        *("Kolibri1Attention", "LagunaAttention", "Lfm2Attention", "Lfm2MoeAttention"),
        *("MellumAttention", "MiniMaxM2Attention"),
        *("Olmo2Attention", "Olmo3Attention", "OlmoeAttention"),
        *("Qwen3Attention", "Qwen3MoeAttention"),
    }
)
"""The attention modules that do nothing but norms and a rotation of halves between projections and
cache. NanoChat rotates the other way round, and Llama 4 by complex numbers."""

_ROTATION = "apply_rotary_pos_emb"


class StandIn:
    """What a module's ``forward`` gets as the module, and as cosines and sines if the update of the
    cache is to normalize and rotate.

    Args:
        module: an attention module.
        cache: of ``generate_batch``.
        cos_sin: ``[1, num_tokens, rotary_dim]`` cosines, and sines; None: the module does it all.
    """

    def __init__(
        self, module: Any, cache: Any, cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        self.module = module
        self.cache = cache
        self._cos_sin = cos_sin
        self._is_rotated = False
        if cos_sin is not None:
            for name in norms_of(module):
                setattr(self, name, _same)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @staticmethod
    def rotate(*arguments: Any, **_: Any) -> Any:
        """``apply_rotary_pos_emb``, which notes that the layer rotates, and does not do it."""
        *states, this, _ = arguments
        this._is_rotated = True
        return states if len(states) > 1 else states[0]

    def update_arguments(self) -> dict[str, Any]:
        """The arguments of ``kv_cache_update`` for what ``forward`` left out."""
        if self._cos_sin is None:
            return {}
        arguments = norm_arguments(self.module)
        if not self._is_rotated:
            return arguments
        cos, sin = self._cos_sin
        if not hasattr(cos, "xla_gpu_rotary"):  # lives as long as the step
            halves = [x[0, :, : x.shape[2] // 2] for x in (cos, sin)]
            positions = torch.arange(cos.shape[1], dtype=torch.int32, device=cos.device)
            rotary = {"positions": positions, "cos_sin_cache": torch.cat(halves, -1)}
            cos.xla_gpu_rotary = rotary  # type: ignore[attr-defined]
        return arguments | cos.xla_gpu_rotary  # type: ignore[attr-defined,no-any-return]


def _same(states: torch.Tensor) -> torch.Tensor:
    return states


def fuse_updates(model: Any) -> None:
    """Makes the known attention classes in the file of a model's class leave norms and rotation to
    the update of the cache, where our attention has one."""
    for name, kind in vars(sys.modules[type(model).__module__]).items():
        if name in CLASSES:
            _fuse(kind)


@functools.cache
def _fuse(kind: Any) -> None:
    upstream = kind.forward
    own = inspect.unwrap(upstream)
    if _ROTATION not in own.__code__.co_names:
        return
    names = own.__globals__ | {_ROTATION: StandIn.rotate}
    without = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    without.__kwdefaults__ = own.__kwdefaults__

    @functools.wraps(upstream)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        cache = keywords.get("cache")
        is_other = self.config._attn_implementation != NAME
        if is_other or not isinstance(cache, PagedAttentionCache) or torch.compiler.is_compiling():
            return upstream(self, *arguments, **keywords)
        if _is_left_to_update(self, cache, keywords):
            stand_in = StandIn(self, cache, keywords["position_embeddings"])
            keywords["position_embeddings"] = (stand_in, stand_in)
            return without(stand_in, *arguments, **keywords)
        # A layer with the keys of another updates no cache, and transformers 5.24 gives none to
        # its attention.
        return upstream(StandIn(self, cache), *arguments, **keywords)

    kind.forward = forward


def _is_left_to_update(module: Any, cache: Any, keywords: dict[str, Any]) -> bool:
    """Whether the update of the cache can do what the module's own operators do."""
    if keywords.get("position_embeddings") is None:
        return False
    if copies_cache(cache.layer_to_allocator[module.layer_idx], keywords):
        return False
    # Other layers read the keys of this one, or this one clips them between norm and rotation.
    has_more = any(
        getattr(module, name, False) for name in ("is_kv_shared_layer", "store_full_length_kv")
    )
    if has_more or getattr(module.config, "clip_qkv", None) is not None:
        return False
    norms = norms_of(module).values()
    return has_known_norms(module) and all(_is_own(norm, cache.dtype) for norm in norms)


def _is_own(norm: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether a call of the norm is its class's function in this dtype and nothing else."""
    has_more = "forward" in vars(norm) or norm._forward_hooks or norm._forward_pre_hooks
    return not has_more and all(weight.dtype == dtype for weight in norm.parameters())
