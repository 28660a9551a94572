"""A Llama in PyTorch over a paged cache: eager, compiled, or on torch_xla's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from shared_ffi.batch import Batch
from xla_paged_attention.engine.model import Config


class Rope(NamedTuple):
    """The rotary embedding of a step's tokens, and the norms of heads before it."""

    positions: Tensor
    """``[num_tokens]``: each token's row of ``cos_sin_cache``."""
    cos_sin_cache: Tensor
    """``[num_tokens, head_size]`` float32: cosines of the angles, then sines."""
    norm_eps: float
    """What a norm adds to the mean of squares."""
    q_norm: Tensor | None = None
    """``[head_size]``: the weights of the norm of queries, as Qwen 3 has it."""
    k_norm: Tensor | None = None
    """The same for keys."""

    def arguments(self) -> dict[str, Any]:
        """What ``kv_cache_update`` takes."""
        if self.q_norm is not None:
            return {**self._asdict(), "norm_round_first": True}
        return {"positions": self.positions, "cos_sin_cache": self.cos_sin_cache}


class Llama(nn.Module):
    """The model. Its modules have transformers' names."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(
                Layer(config, window, f"layers.{i}", weights)
                for i, window in enumerate(config.sliding_windows)
            )
            self.norm = Norm(config.hidden_size, config.norm_epsilon)
            self.lm_head = _linear(config.hidden_size, config.vocab_size, "lm_head", weights)
        self.register_buffer("inv_freq", torch.tensor(config.inv_freq), persistent=False)
        self.load_state_dict(weights, assign=True)

    def new_caches(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """An empty cache for each layer, ``[num_blocks, block_size, 2 * num_kv_heads, head_size]``,
        with the weights' dtype and on their device."""
        shape = (num_blocks, block_size, 2 * self.config.num_kv_heads, self.config.head_size)
        return [self.embed_tokens.weight.new_zeros(shape) for _ in self.layers]

    def forward(self, caches: Sequence[Tensor], batch: Batch) -> Tensor:
        """Runs one step, and writes the new tokens' keys and values into the caches.

        Returns:
            The logits of each sequence's last token, ``[max_seqs, vocab_size]`` float32.
        """
        x = self.hidden(caches, batch)
        return self.logits(x[(batch.query_start_loc[1:] - 1).clamp(min=0)])

    def logits(self, x: Tensor) -> Tensor:
        """``[..., vocab_size]`` float32, of what the last layer gives."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits.float()

    def hidden(self, caches: Sequence[Tensor], batch: Batch) -> Tensor:
        """The last layer's ``[num_tokens, hidden_size]``; as ``forward``."""
        x: Tensor = self.embed_tokens(batch.tokens)
        angles = batch.positions[:, None].float() * self.inv_freq
        cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1) * self.config.rope_scale
        numbers = torch.arange(len(x), dtype=torch.int32, device=x.device)
        rope = Rope(numbers, cos_sin_cache, self.config.norm_epsilon)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, cache, batch)
        return x


class Layer(nn.Module):
    """Attention, then the perceptron, each added to its input."""

    def __init__(
        self, config: Config, window: int | None, name: str, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_epsilon)
        self.self_attn = Attention(config, window, f"{name}.self_attn", weights)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_epsilon)
        self.mlp = Mlp(config, f"{name}.mlp", weights)

    def forward(self, x: Tensor, rope: Rope, cache: Tensor, batch: Batch) -> Tensor:
        """As ``Llama.forward``, for one layer."""
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, batch)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Attention(nn.Module):
    """Writes the cache, then attends to it."""

    def __init__(
        self, config: Config, window: int | None, name: str, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.head_size, self.window = config.head_size, window
        hidden = config.hidden_size
        num_queries = config.num_heads * config.head_size
        num_keys = config.num_kv_heads * config.head_size
        self.q_proj = _linear(hidden, num_queries, f"{name}.q_proj", weights)
        self.k_proj = _linear(hidden, num_keys, f"{name}.k_proj", weights)
        self.v_proj = _linear(hidden, num_keys, f"{name}.v_proj", weights)
        self.o_proj = _linear(num_queries, hidden, f"{name}.o_proj", weights)
        self.q_norm = self.k_norm = None
        if f"{name}.q_norm.weight" in weights:  # Qwen 3
            self.q_norm = Norm(config.head_size, config.norm_epsilon)
            self.k_norm = Norm(config.head_size, config.norm_epsilon)

    def forward(self, x: Tensor, rope: Rope, cache: Tensor, batch: Batch) -> Tensor:
        """As ``Llama.forward``, for one layer's attention."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            projection(x).view(len(x), -1, self.head_size) for projection in projections
        )
        if self.q_norm is not None and self.k_norm is not None:
            rope = rope._replace(q_norm=self.q_norm.weight, k_norm=self.k_norm.weight)
        attended = self.attend(query, key, value, rope, cache, batch)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rope: Rope, cache: Tensor, batch: Batch
    ) -> Tensor:
        """Normalizes and rotates queries and keys, writes keys and values, and returns what the
        queries attend to, in their shape."""
        ops = torch.ops.xla_gpu
        ops.kv_cache_update(cache, key, value, batch.slot_mapping, query=query, **rope.arguments())
        attended: Tensor = ops.paged_attention(
            query,
            cache,
            batch.context_lens,
            batch.block_tables,
            batch.query_start_loc,
            batch.num_seqs,
            self.head_size**-0.5,
            self.window,
        )
        return attended


class Mlp(nn.Module):
    """The gated perceptron."""

    def __init__(self, config: Config, name: str, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear(hidden, inner, f"{name}.gate_proj", weights)
        self.up_proj = _linear(hidden, inner, f"{name}.up_proj", weights)
        self.down_proj = _linear(inner, hidden, f"{name}.down_proj", weights)

    def forward(self, x: Tensor) -> Tensor:
        """``[num_tokens, hidden_size]``."""
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Norm(nn.Module):
    """Divides by the root mean square, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        return _normalized(x, self.weight, self.epsilon)


def rotated(query: Tensor, key: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Queries and keys, ``[num_tokens, heads, head_size]``, normalized and rotated. There are
    derivatives."""
    if rope.q_norm is not None and rope.k_norm is not None:
        query = _normalized(query, rope.q_norm, rope.norm_eps)
        key = _normalized(key, rope.k_norm, rope.norm_eps)
    return _rotated(query, rope), _rotated(key, rope)


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def _rotated(x: Tensor, rope: Rope) -> Tensor:
    """Element i of a head and element i + head_size / 2 are a point."""
    first, second = x.float().chunk(2, -1)
    cos, sin = rope.cos_sin_cache[:, None].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _linear(inputs: int, outputs: int, name: str, weights: Mapping[str, Tensor]) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in weights)
