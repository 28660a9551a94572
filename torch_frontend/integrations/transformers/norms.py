"""From the norms of an attention module to the arguments of ``kv_cache_update``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_frontend.integrations.transformers.shared import NAME


class _Kind(NamedTuple):
    """How a module computes."""

    options: Mapping[str, Any]
    """The arguments of `kv_cache_update` that differ from their defaults."""
    modules: tuple[str, ...]
    """The classes."""


KINDS = (
    _Kind(
        {"norm_round_first": True},
        (
            *("ApertusRMSNorm", "Dots1RMSNorm", "Exaone4RMSNorm", "ExaoneMoeRMSNorm"),
            *("Glm4MoeRMSNorm", "HYV3RMSNorm"),
            *("HunYuanDenseV1RMSNorm", "HunYuanMoEV1RMSNorm", "HunYuanVLRMSNorm"),
            *("Kolibri1RMSNorm", "LagunaRMSNorm"),
            *("Lfm2MoeRMSNorm", "Lfm2RMSNorm", "Lfm3RMSNorm"),
            *("MellumRMSNorm", "MiniMaxM2RMSNorm", "OlmoeRMSNorm"),
            *("Qwen3MoeRMSNorm", "Qwen3RMSNorm", "Qwen3VLMoeTextRMSNorm", "Qwen3VLTextRMSNorm"),
        ),
    ),
    _Kind(
        {"norm_offset": 1},
        (
            *("Gemma3RMSNorm", "MiniMaxM3VLRMSNorm"),
            *("Qwen3NextRMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3_5RMSNorm"),
            *("Step3p7RMSNorm", "T5Gemma2RMSNorm"),
        ),
    ),
    _Kind(
        {},
        (
            *("AfmoeRMSNorm", "BeamRMSNorm", "FlintRMSNorm"),
            *("FlexOlmoRMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm", "OlmoHybridRMSNorm"),
            *("DiffusionGemmaRMSNorm", "EmbeddingGemma2RMSNorm"),
            *("Gemma3nRMSNorm", "Gemma4RMSNorm", "Gemma4UnifiedRMSNorm"),
            *("Llama4TextL2Norm", "MuseGlimmerRMSNorm", "MuseSparkRMSNorm", "NanoChatRMSNorm"),
            "NeoMMERMSNorm",
        ),
    ),
)
_OPTIONS = {name: kind.options for kind in KINDS for name in kind.modules}

_AFTER_ROPE = (
    *("HunYuanDenseV1Attention", "HunYuanMoEV1Attention", "HunYuanVLDenseV1Attention"),
    *("Llama4TextAttention", "NanoChatAttention"),
)
"""The attention modules that rotate before they normalize."""

_NAMES = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), ("q_norm",)),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), ("k_norm",)),
    "qk_norm": ("q_norm", "k_norm"),
    "v_norm": ("v_norm",),
}
"""The arguments of `kv_cache_update` for each name of a norm."""


def norms_of(attention: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The norms of queries, keys and values by their names. A layer that reads the keys of another
    has one of queries alone."""
    return {name: x for name, x in attention.named_children() if name in _NAMES}


def has_known_norms(attention: torch.nn.Module) -> bool:
    """Whether ``norm_arguments`` knows the classes of a module's norms."""
    return all(type(norm).__name__ in _OPTIONS for norm in norms_of(attention).values())


def norm_arguments(attention: torch.nn.Module) -> dict[str, Any]:
    """The arguments of ``kv_cache_update`` that do what the norms of an attention module do.

    With them, K in the cache and the query have the bits of the module's own norms on a CPU with
    x86, and differ by rounding errors elsewhere, where PyTorch adds in another order.

    Args:
        attention: an attention module of transformers, such as ``model.layers[0].self_attn``.

    Returns:
        ``q_norm``, ``k_norm``, ``norm_eps``, and what differs from the defaults; empty where the
        module has no norms.

    Raises:
        NotImplementedError: its norms are of classes that are not known here.
    """
    norms = norms_of(attention)
    if not norms:
        return {}
    if not has_known_norms(attention):
        names = " and ".join(sorted({type(norm).__name__ for norm in norms.values()}))
        raise NotImplementedError(
            f"{NAME}: the norms of an attention module must be of a class that is known; got "
            f"{names} in {type(attention).__name__}. Normalize before kv_cache_update, and give "
            "it no norms"
        )
    arguments: dict[str, Any] = {}
    for name, norm in norms.items():
        for argument in _NAMES[name]:
            arguments[argument] = True if argument == "v_norm" else _weight(attention, norm)
    norm = next(iter(norms.values()))
    arguments["norm_eps"] = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    arguments |= _OPTIONS[type(norm).__name__]
    if type(attention).__name__ in _AFTER_ROPE:
        arguments["norm_after_rope"] = True
    return arguments


def _weight(attention: Any, norm: Any) -> torch.Tensor:
    """The weights of a head, or of all heads."""
    head_size: int = attention.head_dim
    weight = getattr(norm, "weight", None)
    if weight is None:
        device = next(attention.parameters()).device
        return torch.ones(head_size, device=device)
    weight = weight.detach()
    return weight if weight.numel() == head_size else weight.view(-1, head_size)
