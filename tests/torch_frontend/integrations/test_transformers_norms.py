"""The norms of attention modules in the cache update, against the modules' own results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.support import causal_models  # noqa: E402
from torch_frontend import kv_cache_update  # noqa: E402
from torch_frontend.integrations.transformers.norms import KINDS, norm_arguments  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs/features/caches.md"
FAMILIES = {
    "apertus": "Apertus",
    "dots1": "dots.llm1",
    "exaone4": "EXAONE 4",
    "flex_olmo": "FlexOlmo",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4",
    "glm4_moe": "GLM-4 MoE",
    "hunyuan_v1_dense": "HunYuan",
    "hunyuan_v1_moe": "HunYuan MoE",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 MoE",
    "llama4_text": "Llama 4",
    "minimax_m2": "MiniMax M2",
    "nanochat": "NanoChat",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3 MoE",
    "qwen3_next": "Qwen3-Next",
}
"""The page's name of each model type."""

CHANGES = {"glm4_moe": {"use_qk_norm": True}}


def attention_of(family: str) -> Any:
    """An attention module with random weights."""
    config = causal_models.config_of(family)
    for name, value in CHANGES.get(family, {}).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    attention = next(x for x in model.modules() if norm_arguments(x))
    for norm in norms_of(attention):
        for weight in norm.parameters():
            torch.nn.init.normal_(weight, 1, 0.5)
    return attention


def norms_of(attention: Any) -> list[Any]:
    """The norms of queries and keys."""
    modules = [x for name, x in attention.named_children() if name[0] in "qk" and "norm" in name]
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
        wanted = [*map(normalized, norms_of(attention), (query, key))]
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
    found = {type(x).__name__ for name in FAMILIES for x in norms_of(attention_of(name))}
    assert found == {name for kind in KINDS for name in kind.modules}


def test_the_table_of_the_page() -> None:
    rows: dict[str, list[str]] = {}
    for family, title in FAMILIES.items():
        arguments = norm_arguments(attention_of(family))
        together = arguments["q_norm"].ndim == 2
        weight = "`[heads, head_size]`" if together else "`[head_size]`"
        weightless = not any([*x.parameters()] for x in norms_of(attention_of(family)))
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
