"""DeepSeek-V3 of transformers gives the tokens of its own attention: with its keys and values
absorbed, over a cache of latents, and without, where V has a head size of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

import torch_frontend

PROMPT, NEW_TOKENS, BLOCK_SIZE = 37, 12, 8
TABLE = [5, 2, 9, 0, 7, 3, 8]  # blocks of the pool, of one sequence


def small_model() -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=20,
        v_head_dim=24,
        max_position_embeddings=256,
        attn_implementation="eager",
        eos_token_id=None,
        initializer_range=0.2,
    )
    return DeepseekV3ForCausalLM(config).eval()


class LatentAttention:
    """A forward of DeepseekV3Attention with a paged cache of latents for each layer."""

    def __init__(self) -> None:
        self.caches: dict[int, torch.Tensor] = {}
        self.context_len = 0

    def __call__(
        self, layer: Any, hidden: torch.Tensor, position_embeddings: Any, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        (_, num_tokens, _), rank = hidden.shape, layer.kv_lora_rank
        query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
        query = query.view(1, num_tokens, -1, layer.qk_head_dim).transpose(1, 2)
        nope, rope = query.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
        latent, key_rope = layer.kv_a_proj_with_mqa(hidden).split([rank, rope.shape[3]], -1)
        rope, key_rope = deepseek.apply_rotary_pos_emb_interleave(
            rope, key_rope[:, None], *position_embeddings
        )
        key = torch.cat([layer.kv_a_layernorm(latent), key_rope[:, 0]], -1)[0][:, None]
        head_weights = layer.kv_b_proj.weight.view(layer.num_heads, -1, rank)
        to_key, to_value = head_weights.split([layer.qk_nope_head_dim, layer.v_head_dim], 1)
        absorbed = torch.cat([torch.einsum("bhtn,hnr->bhtr", nope, to_key), rope], -1)[0]
        output = torch.einsum("thr,hvr->thv", self.attend(layer, absorbed, key), to_value)
        return layer.o_proj(output.reshape(1, num_tokens, -1)), None

    def attend(self, layer: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        num_tokens, _, head_size = key.shape
        cache = self.caches.setdefault(layer.layer_idx, torch.zeros(10, BLOCK_SIZE, head_size))
        table = torch.tensor(TABLE, dtype=torch.int32)
        positions = torch.arange(self.context_len - num_tokens, self.context_len)
        slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        torch_frontend.kv_cache_update(cache, key, key[..., :0], slots)
        numbers = ([self.context_len], [TABLE], [0, num_tokens], 1)
        return torch_frontend.paged_attention(
            query.transpose(0, 1).contiguous(),
            cache,
            *(torch.tensor(x, dtype=torch.int32) for x in numbers),
            layer.scaling,
            value_head_size=layer.kv_lora_rank,
        )


@torch.inference_mode()
def test_deepseek(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    prompt = torch.randint(200, (1, PROMPT))
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert len(set(expected[0, PROMPT:].tolist())) > 3  # else any attention would give them
    logits = model(expected).logits[0]

    attention = LatentAttention()
    monkeypatch.setattr(
        deepseek.DeepseekV3Attention,
        "forward",
        lambda layer, hidden_states, **others: attention(layer, hidden_states, **others),
    )
    tokens, step = prompt, prompt
    for _ in range(NEW_TOKENS):
        positions = torch.arange(attention.context_len, attention.context_len + step.shape[1])
        attention.context_len += step.shape[1]
        result = model(step, position_ids=positions[None], use_cache=False).logits[0]
        torch.testing.assert_close(result, logits[positions], rtol=1e-4, atol=1e-4)
        step = result[-1:].argmax(-1)[None]
        tokens = torch.cat([tokens, step], 1)
    assert torch.equal(tokens, expected)
