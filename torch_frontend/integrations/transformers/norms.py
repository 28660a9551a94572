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
            "ApertusRMSNorm",
            "Dots1RMSNorm",
            "Exaone4RMSNorm",
            "Glm4MoeRMSNorm",
            "HunYuanDenseV1RMSNorm",
            "HunYuanMoEV1RMSNorm",
            "Lfm2RMSNorm",
            "Lfm2MoeRMSNorm",
            "MiniMaxM2RMSNorm",
            "OlmoeRMSNorm",
            "Qwen3MoeRMSNorm",
            "Qwen3RMSNorm",
        ),
    ),
    _Kind({"norm_offset": 1}, ("Gemma3RMSNorm", "Qwen3NextRMSNorm")),
    _Kind(
        {},
        (
            *("FlexOlmoRMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm"),
            *("Gemma3nRMSNorm", "Gemma4RMSNorm"),
            *("Llama4TextL2Norm", "NanoChatRMSNorm"),
        ),
    ),
)
_OPTIONS = {name: kind.options for kind in KINDS for name in kind.modules}

_AFTER_ROPE = (
    *("HunYuanDenseV1Attention", "HunYuanMoEV1Attention"),
    *("Llama4TextAttention", "NanoChatAttention"),
)
"""The attention modules that rotate before they normalize."""

_NAMES = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)


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
    names = next((pair for pair in _NAMES if hasattr(attention, pair[0])), ())
    # A layer that reads the keys of another has queries alone.
    norms = {
        argument: getattr(attention, name)
        for argument, name in zip(("q_norm", "k_norm"), names, strict=False)
        if hasattr(attention, name)
    }
    if not norms:
        return {}
    for norm in norms.values():
        if type(norm).__name__ not in _OPTIONS:
            raise NotImplementedError(
                f"{NAME}: the norms of an attention module must be of a class that is known; got "
                f"{type(norm).__name__} in {type(attention).__name__}. Normalize before "
                "kv_cache_update, and give it no norms"
            )
    norm = norms["q_norm"]
    arguments: dict[str, Any] = {name: _weight(attention, x) for name, x in norms.items()}
    arguments["norm_eps"] = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    arguments |= _OPTIONS[type(norm).__name__]
    if type(attention).__name__ in _AFTER_ROPE:
        arguments["norm_after_rope"] = True
    if hasattr(attention, "v_norm"):
        arguments["v_norm"] = True
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
