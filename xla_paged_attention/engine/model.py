"""A model of the Llama family: its sizes and its weights, without a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Config:
    """The sizes of a model, and what its weights do not tell.

    Attributes:
        vocab_size: tokens that there are.
        hidden_size: numbers of a token between two layers.
        intermediate_size: numbers of a token inside the perceptron.
        num_heads: query heads of a layer, a multiple of ``num_kv_heads``.
        num_kv_heads: kv heads of a layer.
        head_size: numbers of a head, even.
        norm_epsilon: what is added to the mean square before its root.
        inv_freq: radians per position of the rotary embedding, ``head_size / 2`` of them.
        rope_scale: factor of sine and cosine; 1 for most models.
        sliding_windows: positions that each layer attends to, or None for all; one for each layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_epsilon: float
    inv_freq: tuple[float, ...]
    rope_scale: float
    sliding_windows: tuple[int | None, ...]


class Model:
    """What a runner needs of a model.

    Args:
        config: sizes.
        weights: by transformers' names without ``model.``, all of one dtype. A linear layer has
            ``[outputs, inputs]``; ``lm_head.weight`` is there even if it is that of the
            embedding. Biases, and the norms of Qwen 3's heads, are optional. A ``JaxRunner`` takes
            arrays of NumPy or JAX, or tensors; a ``TorchRunner`` arrays of NumPy, or tensors.
    """

    def __init__(self, config: Config, weights: Mapping[str, Any]) -> None:
        self.config = config
        self.weights = weights

    @classmethod
    def random(cls, config: Config, seed: int = 0) -> Model:
        """A model that knows nothing, with weights of float32, for tests.

        Args:
            config: sizes.
            seed: the same one gives the same weights.
        """
        rng = np.random.default_rng(seed)
        weights = {}
        for name, shape in weight_shapes(config).items():
            numbers = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
            weights[name] = numbers if len(shape) == 2 else np.ones(shape, np.float32)
        return cls(config, weights)


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The weights that every model of the family has, by their names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    num_queries, num_keys = (
        heads * config.head_size for heads in (config.num_heads, config.num_kv_heads)
    )
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (num_queries, hidden),
        "self_attn.k_proj": (num_keys, hidden),
        "self_attn.v_proj": (num_keys, hidden),
        "self_attn.o_proj": (hidden, num_queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, hidden)}
    for i in range(len(config.sliding_windows)):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"norm": (hidden,), "lm_head": (config.vocab_size, hidden)}
    return {f"{name}.weight": shape for name, shape in shapes.items()}
