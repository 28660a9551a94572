"""The norms of attention modules in the cache update, against the modules' own results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb  # noqa: E402

from tests.support import causal_models  # noqa: E402
from tests.support.model_families import with_random_weights  # noqa: E402
from torch_frontend import kv_cache_update  # noqa: E402
from torch_frontend.integrations.transformers import NAME, fused_update  # noqa: E402
from torch_frontend.integrations.transformers.norms import (  # noqa: E402
    KINDS,
    norm_arguments,
    norms_of,
)

PAGE = Path(__file__).parents[3] / "docs/features/caches.md"
FAMILIES = {
    "afmoe": "AFMoE",
    "apertus": "Apertus",
    "beam": "Beam",
    "diffusion_gemma": "DiffusionGemma",
    "dots1": "dots.llm1",
    "embedding_gemma2_text": "EmbeddingGemma 2",
    "exaone4": "EXAONE 4",
    "exaone_moe": "EXAONE MoE",
    "flex_olmo": "FlexOlmo",
    "flint": "Flint",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4",
    "gemma4_unified_text": "Gemma 4 unified",
    "glm4_moe": "GLM-4 MoE",
    "hunyuan_v1_dense": "HunYuan",
    "hunyuan_v1_moe": "HunYuan MoE",
    "hunyuan_vl": "HunYuan-VL",
    "hy_v3": "Hy3",
    "kolibri1": "Kolibri",
    "laguna": "Laguna",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 MoE",
    "lfm3": "LFM3",
    "llama4_text": "Llama 4",
    "mellum": "Mellum",
    "minimax_m2": "MiniMax M2",
    "minimax_m3_vl_text": "MiniMax M3",
    "muse_glimmer_text": "Muse Glimmer",
    "muse_spark_text": "Muse Spark",
    "nanochat": "NanoChat",
    "neomme": "NeoMME",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo Hybrid",
    "olmoe": "OLMoE",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3.5 MoE",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_moe": "Qwen3 MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_vl_moe_text": "Qwen3-VL MoE",
    "qwen3_vl_text": "Qwen3-VL",
    "step3p7": "Step 3.7",
    "t5gemma2": "T5Gemma 2",
}
"""The page's name of each model type."""

CHANGES: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 1},
    # transformers' paged cache takes one size of heads for all layers, and attention alone.
    "gemma4_text": {"num_kv_shared_layers": 1, "head_dim": 512},
    "gemma4_unified_text": {"num_kv_shared_layers": 1, "head_dim": 512},
    "glm4_moe": {"use_qk_norm": True},
    "lfm2_moe": {"layer_types": ["full_attention"] * causal_models.LAYERS},
}


def attention_of(family: str) -> Any:
    """An attention module with random weights."""
    torch.manual_seed(0)
    config = causal_models.config_of(family, **CHANGES.get(family, {}))
    model = transformers.AutoModel.from_config(config)
    attention = next(x for x in model.modules() if norm_arguments(x))
    for norm in pair_of(attention):
        for weight in norm.parameters():
            torch.nn.init.normal_(weight, 1, 0.5)
    return attention


def pair_of(attention: Any) -> list[Any]:
    """The norms of queries and keys, which may be one."""
    modules = [x for name, x in norms_of(attention).items() if name != "v_norm"]
    return modules * 2 if len(modules) == 1 else modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_bits_of_its_norms(family: str, dtype: torch.dtype) -> None:
    attention = attention_of(family).to(dtype)
    head_size, num_kv_heads, num_tokens = attention.head_dim, 2, 5
    arguments = norm_arguments(attention)
    num_heads = len(arguments["q_norm"]) if arguments["q_norm"].ndim == 2 else 4
    query = torch.randn(num_tokens, num_heads, head_size).to(dtype) * 3
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_size).to(dtype)

    def normalized(norm: Any, rows: torch.Tensor) -> torch.Tensor:
        weight = getattr(norm, "weight", None)
        is_together = weight is not None and weight.numel() != head_size
        return norm(rows.flatten(1) if is_together else rows).view(rows.shape)

    with torch.no_grad():
        wanted = [*map(normalized, pair_of(attention), (query, key))]
        values = attention.v_norm(value) if arguments.get("v_norm") else value
    if arguments.pop("norm_after_rope", False):  # a rotation by no angle
        table = torch.cat([torch.ones(1, head_size // 2), torch.zeros(1, head_size // 2)], 1)
        positions = torch.zeros(num_tokens, dtype=torch.int32)
        arguments |= {"norm_after_rope": True, "positions": positions, "cos_sin_cache": table}
    cache = torch.zeros(2, 4, 2 * num_kv_heads, head_size, dtype=dtype)
    slots = torch.tensor([6, 0, 3, 7, 1], dtype=torch.int32)
    kv_cache_update(cache, key, value, slots, query=query, **arguments)
    written = cache.flatten(0, 1)[slots.long()]
    assert torch.equal(query, wanted[0])
    assert torch.equal(written[:, ::2], wanted[1])
    assert torch.equal(written[:, 1::2], values)


def test_every_known_norm_has_a_family() -> None:
    found = {type(x).__name__ for name in FAMILIES for x in pair_of(attention_of(name))}
    assert found == {name for kind in KINDS for name in kind.modules}


def test_the_table_of_the_page() -> None:
    rows: dict[str, list[str]] = {}
    for family, title in FAMILIES.items():
        arguments = norm_arguments(attention_of(family))
        together = arguments["q_norm"].ndim == 2
        weight = "`[heads, head_size]`" if together else "`[head_size]`"
        weightless = not any([*x.parameters()] for x in pair_of(attention_of(family)))
        options = [
            f"`{x}={y}`" for x, y in arguments.items() if x[1:] != "_norm" and x != "norm_eps"
        ]
        options += ["`v_norm=True`"] if "v_norm" in arguments else []
        row = f"{'ones' if weightless else weight} | {', '.join(options) or 'none'}"
        rows.setdefault(row, []).append(title)
    table = "\n".join(f"| {', '.join(titles)} | {row} |" for row, titles in rows.items())
    assert table in PAGE.read_text(), table


def test_other_norms_are_refused() -> None:
    attention = torch.nn.Module()
    attention.q_norm = attention.k_norm = torch.nn.LayerNorm(8)
    with pytest.raises(NotImplementedError, match="class that is known; got LayerNorm in Module"):
        norm_arguments(attention)


FUSED = (
    *("afmoe", "apertus", "dots1", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma3_text"),
    *("gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm4_moe", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "lfm2", "lfm2_moe", "mellum", "minimax_m2"),
    *("olmo2", "olmo3", "olmoe", "qwen3", "qwen3_moe"),
)
ROTATED_IN_FLOAT32 = ("flex_olmo", "olmo2", "olmo3")


def model_of(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = causal_models.config_of(family, **CHANGES.get(family, {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    model = with_random_weights(model.to(dtype), std=0.2)
    for module in model.modules():
        for weight in (x for norm in norms_of(module).values() for x in norm.parameters()):
            torch.nn.init.normal_(weight, 1, 0.5)
    return model


def outcome_of(model: Any) -> list[Any]:
    """The tokens that ``generate_batch`` gives, and their log-probabilities."""
    greedy = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=4, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=32, page_size=8, max_batch_tokens=64, return_logprobs=True
    )
    prompts = [[*range(5, 5 + length)] for length in (1, 12, 40)]
    results = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=batching
    )
    return sorted((x.prompt_ids, x.generated_tokens, x.logprobs) for x in results.values())


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What updates of caches were given to do for the modules."""
    noted: list[dict[str, Any]] = []

    def note(self: Any) -> dict[str, Any]:
        noted.append(arguments(self))
        return {**noted[-1]}

    arguments = fused_update.StandIn.update_arguments
    monkeypatch.setattr(fused_update.StandIn, "update_arguments", note)
    return noted


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FUSED),
        *((family, torch.bfloat16) for family in ROTATED_IN_FLOAT32),
    ],
)
def test_a_model_leaves_norms_and_rotation_to_the_update(
    family: str, dtype: torch.dtype, left: list[dict[str, Any]]
) -> None:
    model = model_of(family, dtype)
    found = outcome_of(model)
    assert any("q_norm" in x and "cos_sin_cache" in x for x in left)
    left.clear()
    for module in model.modules():  # norms with a hook are not left out
        for norm in norms_of(module).values():
            norm.register_forward_hook(lambda *_: None)
    assert outcome_of(model) == found
    assert not any(left)


def test_every_class_that_leaves_its_norms_has_a_family() -> None:
    assert {type(attention_of(name)).__name__ for name in FUSED} == fused_update.CLASSES


def test_a_forward_without_the_known_rotation_stays() -> None:
    class Qwen3Attention:
        def forward(self) -> None: ...

    forward = Qwen3Attention.forward
    fused_update._fuse(Qwen3Attention)
    assert Qwen3Attention.forward is forward


def test_a_rotation_is_rounded_once() -> None:
    """Where a module rounds the products of a rotation and their sum, the update is nearer to the
    exact result, and the difference is no more than those roundings."""
    attention = attention_of("qwen3").bfloat16()
    size = attention.head_dim
    angles = torch.linspace(0, 6, 8 * size // 2).view(1, 8, -1)
    cos, sin = (torch.cat([x, x], -1).bfloat16() for x in (angles.cos(), angles.sin()))
    query = torch.randn(1, 2, 8, size).bfloat16()
    with torch.no_grad():
        normalized = attention.q_norm(query)
        theirs, _ = apply_rotary_pos_emb(normalized, normalized, cos, sin)
        wide = (x.double() for x in (normalized, normalized, cos, sin))
        exact, _ = apply_rotary_pos_emb(*wide)
    stand_in = fused_update.StandIn(attention, None, (cos, sin))
    stand_in.rotate(query, query, stand_in, stand_in)
    ours = query[0].transpose(0, 1).contiguous()
    rows = ours[:, :1].clone()
    cache = torch.zeros(1, 8, 2, size, dtype=torch.bfloat16)
    slots = torch.arange(8, dtype=torch.int32)
    kv_cache_update(cache, rows, rows, slots, query=ours, **stand_in.update_arguments())
    theirs, exact = (x[0].transpose(0, 1).double() for x in (theirs, exact))
    unit = torch.finfo(torch.bfloat16).eps
    largest = normalized.abs().max().item()
    torch.testing.assert_close(ours.double(), exact, rtol=unit / 2, atol=0)
    assert (theirs - exact).abs().max() > (ours - exact).abs().max()
    torch.testing.assert_close(ours.double(), theirs, rtol=unit, atol=unit * largest)
