"""Every causal language model of transformers, small and with random weights, with its own attention
and with ours.

`python -m tests.support.causal_models` writes what comes out into docs/transformers.md.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.model_families import with_random_weights
from torch_frontend.integrations.transformers import NAME

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
PAGE = Path(__file__).parents[2] / "docs/transformers.md"
VERSION = "5.23."  # of transformers, that the page is about
BEGIN, END = "<!-- by tests.support.causal_models -->", "<!-- end -->"

LAYERS, WINDOW, LENGTH, PADDING, NEW_TOKENS = 4, 13, 40, 17, 5
FULL_AND_SLIDING = ["sliding_attention", "full_attention"]
SIZES = [
    (r"use_sliding_window|is_decoder", True),
    (r"num_kv_shared_layers|max_window_layers|attn_layer_period", 2),
    (r"attn_layer_offset|mamba_expand|expand", 1),
    (r"(\w*_)?num_hidden_layers|num_layers|n_layers?|(de|en)coder_layers|depth", LAYERS),
    (r"(?!max)(?!.*pattern)\w*window(_size|_len)?|local_attention|attention_chunk_size", WINDOW),
    (r"\w*vocab(_size.*)?", 97),
    (r"pad_token_id", 0),
    (r"\w+_token_(id|index)", 1),
    (r"qk_head_dim", 32),
    (r"\w*head_dim|attention_head_size|mamba_d_head|mamba_headdim|kv_channels|d_kv|d_head", 16),
    (r"dim_head", 16),
    (r"(?!index)\w*(num_key_value|kv|kv_n)_heads|num_query_groups", 2),
    (r"(\w+_)?(num_|attention_|n_|mamba_num_)+heads?|linear_num_\w+_heads|indexer?_n_heads", 4),
    (r"hidden_size|\w+_hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_(size|dim)", 64),
    (r"lru_width|word_embed_proj_dim|hidden_size_global|\w*project\w+_dim|mamba_d_ssm", 64),
    (r"\w*intermediate_size(_mlp)?|\w*ffn_dim|\w*ffn_hidden_size|adapter_in_dim", 64),
    (r"n_inner|d_inner|d_ff|dff|dim_ff|feed_forward_size", 64),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k", 2),
    (r"n_group|n_groups|topk_group|indexer_kv_heads|num_expert_group|n_shared_experts", 1),
    (r"\w*(kv|q|o)_lora_rank|hc_lowrank|adapter_rank|gated_norm_rank", 32),
    (r"index_topk\w*|index_block_size|indexer_compress_ratio", 4),
    (r"indexer_budget|rotary_dim", 8),
    (r"ngram_vocab_size_base", 100),
]
"""The value of each field of a configuration whose name matches. The first match decides."""
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            x: {"rope_type": "default", "rope_theta": 1e4} for x in FULL_AND_SLIDING
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "gemma3n_text": {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
}
"""What the names of the fields do not tell."""


def config_of(name: str, **changes: Any) -> Any:
    kind = CONFIG_MAPPING[name]
    return kind(**_sizes(kind()) | CHANGES.get(name, {}) | changes)


def _sizes(config: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    fields = {field.name for field in dataclasses.fields(config)}
    for name in sorted(fields):
        value = vars(config).get(name)
        if isinstance(value, transformers.PreTrainedConfig):
            sizes[name] = _sizes(value) | (
                {"model_type": value.model_type} if value.model_type else {}
            )
        elif _is_kinds(name, value):
            kinds = list(dict.fromkeys(value))
            if "sliding_window" in fields and {*kinds} <= {*FULL_AND_SLIDING}:
                kinds = FULL_AND_SLIDING
            sizes[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
        elif not isinstance(value, (dict, tuple, list)) or name in SIMPLE:
            matches = (size for pattern, size in SIZES if re.fullmatch(pattern, name))
            if (size := next(matches, None)) is not None:
                sizes[name] = size
    if "kv_lora_rank" in fields:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return sizes


def _is_kinds(name: str, value: Any) -> bool:
    """Whether it is a list with the kind of each layer."""
    return (
        name.endswith(("_types", "block_type"))
        and isinstance(value, list)
        and isinstance(value[0], str)
    )


SIMPLE = ("eos_token_id", "intermediate_size")
"""Fields that may be one number, whatever is their default."""


class Outcome(NamedTuple):
    title: str
    """One of those below, or with what the error says."""
    detail: str = ""


EQUAL = "The logits of `eager`"
EQUAL_WITHOUT_PADDING = "The same without padding; with padding `sdpa` differs from `eager`, too"
OWN = "The logits of `eager`, because they call no attention function"
REFUSED = "Refused"
NOT_TRIED = "Not tried, because the small model does not run with `eager` either"
WRONG = "Wrong"


def outcome_of(name: str) -> Outcome:
    """What becomes of a model with our attention, beyond its window."""
    try:
        wanted = _logits(name, "eager")
    except Exception as error:
        return Outcome(NOT_TRIED, repr(error))
    calls = []

    def attention(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return ours(*args, **kwargs)

    ours = ALL_ATTENTION_FUNCTIONS[NAME]
    try:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
        got = _logits(name, NAME)
    except Exception as error:
        rule = re.match(f"{NAME}: ([^;]+);", str(error))
        if rule is None or not isinstance(error, NotImplementedError):
            return Outcome(WRONG, repr(error))
        return Outcome(f"{REFUSED}: {rule[1]}", repr(error))
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, ours)
    if not (far := _far(got, wanted)):
        return Outcome(EQUAL if calls else OWN)
    if all("padded" in key for key in far) and far.keys() <= _far_of_sdpa(name, wanted):
        return Outcome(EQUAL_WITHOUT_PADDING)
    return Outcome(WRONG, f"{far}")


def _far_of_sdpa(name: str, wanted: dict[str, torch.Tensor]) -> set[str]:
    try:
        return {*_far(_logits(name, "sdpa"), wanted)}
    except ValueError:  # the model has none
        return set()


def _far(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The errors that are too large for rounding errors, which are at most 2e-5. Each is a part of
    the largest logit."""
    errors = {x: float((got[x] - y).abs().max() / y.abs().max()) for x, y in wanted.items()}
    return {key: error for key, error in errors.items() if not error < 1e-3}


@torch.no_grad()
def _logits(name: str, attention: str) -> dict[str, torch.Tensor]:
    """The logits of a prompt, alone and in a batch after one that begins with padding, and of the
    tokens after it."""
    torch.manual_seed(0)
    config = config_of(name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = with_random_weights(model, std=0.2)
    tokens = torch.randint(2, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[1, :PADDING] = 0
    mask = (tokens > 0).long()
    logits = {
        "prompt": model(tokens[:1]).logits,
        "padded prompt": model(tokens, attention_mask=mask).logits[1, PADDING:],
        "generated": _generated(model, tokens[:1], mask[:1]),
        "padded generated": _generated(model, tokens, mask),
    }
    assert all(x.isfinite().all() for x in logits.values()), "the logits are not finite"
    return logits


def _generated(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    result = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(result.logits)


def listed() -> dict[str, str]:
    """The title under which the page has each model."""
    block = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    paragraphs = re.findall(r"\*\*(.+?)\*\* \(\d+\): (.+?)\.\n", block, re.S)
    return {
        name: " ".join(title.split())
        for title, names in paragraphs
        for name in " ".join(names.split()).split(", ")
    }


def write() -> None:
    """Runs all models and writes the lists of the page."""
    titles: dict[str, list[str]] = {}
    for name in NAMES:
        outcome = outcome_of(name)
        print(name, *outcome, sep=": ", flush=True)
        titles.setdefault(outcome.title, []).append(name)
    paragraphs = [
        textwrap.fill(
            f"**{title}** ({len(names)}): {', '.join(sorted(names))}.",
            width=120,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for title, names in sorted(titles.items(), key=lambda item: -len(item[1]))
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = "\n\n".join([BEGIN, *paragraphs, END])
    PAGE.write_text(before + text + rest.partition(END)[2])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    write()
