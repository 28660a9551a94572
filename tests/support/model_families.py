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


def model_of(family: str, **changes: Any) -> Any:
    """The model with transformers' eager attention. `changes`: of its configuration."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | options | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():  # far from equal logits, and no repetition
        if parameter.ndim > 1 or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config.eos_token_id = None
    return model.eval()
