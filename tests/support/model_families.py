"""Small models of several families, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
WINDOW = 13  # no multiple of a page
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-window": (
        "Qwen3",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    # Its layers with full attention have heads of 512. transformers takes one size for all layers.
    "gemma4": (
        "Gemma4Text",
        {
            "head_dim": 512,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "bloom": ("Bloom", {"n_head": 6, "n_layer": 4}),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
IMAGE, IMAGE_TOKENS = 96, 16
IMAGE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": SIZES | FAMILIES["gemma3"][1],
            "vision_config": _VISION,
            "mm_tokens_per_image": IMAGE_TOKENS,
            "image_token_index": IMAGE,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": SIZES
            | FAMILIES["gemma4"][1]
            | {"head_dim": 16, "use_bidirectional_attention": "vision"},
            "image_token_id": IMAGE,
        },
    ),
    "paligemma2": (
        "PaliGemma",
        {
            "text_config": SIZES | FAMILIES["gemma2"][1] | {"model_type": "gemma2"},
            "vision_config": _VISION | {"model_type": "siglip_vision_model"},
            "projection_dim": 48,
            "hidden_size": 48,
            "image_token_index": IMAGE,
        },
    ),
}
"""Models whose image tokens attend to each other. An image is longer than the window."""


def image_model_of(family: str) -> Any:
    """The model with transformers' eager attention."""
    name, options = IMAGE_FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**options, tie_word_embeddings=False)
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    return with_random_weights(model._from_config(config, attn_implementation="eager"))


def model_of(family: str, **changes: Any) -> Any:
    """The model with transformers' eager attention. `changes`: of its configuration."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | options | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return with_random_weights(model)


def with_random_weights(model: Any, std: float = 0.5) -> Any:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():  # far from equal logits, and no repetition
        if parameter.ndim > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.generation_config.eos_token_id = None
    return model.eval()
