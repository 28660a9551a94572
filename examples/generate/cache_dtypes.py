"""What a cache of fewer bits costs in accuracy: ``python -m examples.generate.cache_dtypes``.

The model answers the questions of ``examples.generate``, and each token of the answers is then
predicted with each kind of cache. Weights and arithmetic are float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import torch_frontend
from examples.generate.run import PROMPTS
from xla_paged_attention.engine.checkpoint import encode, pretrained

INT4 = torch.uint8  # two numbers in an element
SCALED = (torch.float8_e4m3fn, torch.int8, INT4)


class Grouped(NamedTuple):
    """Numbers of 4 bits with a scale for each group of them."""

    codes: str | None
    size: int
    """The numbers of a group. A smaller head is one group."""
    scales: torch.dtype


NVFP4 = Grouped("e2m1", 16, torch.float8_e4m3fn)
INT4_GROUPS = Grouped(None, 32, torch.float16)


class Kind(NamedTuple):
    """What a cache holds."""

    keys: torch.dtype | Grouped
    values: torch.dtype | Grouped
    hadamard: str | None = None
    """As in ``kv_cache_update``."""

    def bits(self, head_size: int) -> float:
        """The bits of a number of K and V, with its share of a scale."""
        cache = Cache.empty(1, 1, head_size, self)
        are_scaled = [isinstance(x, Grouped) or x in SCALED for x in (self.keys, self.values)]
        scales = [x for x, is_scaled in zip(cache.scales, are_scaled, strict=True) if is_scaled]
        return 4 * sum(x.nbytes for x in (*cache.arrays, *scales)) / head_size


CACHES = {
    "float32": Kind(torch.float32, torch.float32),
    "bfloat16": Kind(torch.bfloat16, torch.bfloat16),
    "float8_e4m3fn": Kind(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": Kind(torch.int8, torch.int8),
    "int8, Hadamard": Kind(torch.int8, torch.int8, "kv"),
    "int8 K, int4 V": Kind(torch.int8, INT4),
    "int8 K, int4 V, Hadamard": Kind(torch.int8, INT4, "kv"),
    "int8 K, int4 groups V, Hadamard": Kind(torch.int8, INT4_GROUPS, "kv"),
    "int8 K, NVFP4 V": Kind(torch.int8, NVFP4),
    "int4 K, int8 V": Kind(INT4, torch.int8),
    "int4": Kind(INT4, INT4),
    "int4, Hadamard": Kind(INT4, INT4, "kv"),
    "int4 groups, Hadamard": Kind(INT4_GROUPS, INT4_GROUPS, "kv"),
    "NVFP4": Kind(NVFP4, NVFP4),
    "NVFP4, Hadamard": Kind(NVFP4, NVFP4, "kv"),
}


class Cache(NamedTuple):
    """K and V of a layer, a block for each token, and the scales of each head of a token."""

    arrays: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    codes: str | None

    @classmethod
    def empty(cls, num_tokens: int, num_heads: int, head_size: int, kind: Kind) -> Cache:
        """A cache with scales of 1."""
        shape = (num_tokens, 1, num_heads)
        arrays, scales, codes = [], [], None
        for held in (kind.keys, kind.values):
            if isinstance(held, Grouped):
                dtype, codes = INT4, held.codes
                scales.append(torch.ones(*shape, max(1, head_size // held.size)).to(held.scales))
            else:
                dtype = held
                scales.append(torch.ones(shape))
            arrays.append(
                torch.zeros(*shape, head_size // (2 if dtype == INT4 else 1), dtype=dtype)
            )
        return cls((arrays[0], arrays[1]), (scales[0], scales[1]), codes)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    kind: Kind,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers, for one text and a cache of the kind.

    Args:
        module: an attention layer without sinks.
        query: ``[1, num_heads, num_tokens, head_size]``.
        key, value: ``[1, num_kv_heads, num_tokens, head_size]``.
        attention_mask: none is made for an attention function that transformers does not know.
    """
    assert attention_mask is None and getattr(module, "sinks", None) is None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    num_tokens, num_kv_heads, head_size = key.shape
    cache = Cache.empty(num_tokens, num_kv_heads, head_size, kind)
    keys, values = cache.arrays
    made: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if keys.dtype in SCALED:
        codes = {"codes": cache.codes}
        made = {"k_scale_cache": cache.scales[0], "v_scale_cache": cache.scales[1], **codes}
        options = {"k_scale": cache.scales[0], "v_scale": cache.scales[1], **codes}
    dtype = torch.float32 if options else keys.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if kind.hadamard is not None:
        query = query.contiguous()  # the update writes to it
        made |= {"hadamard": kind.hadamard, "query": query}
    slots = torch.arange(num_tokens, dtype=torch.int32)
    torch_frontend.kv_cache_update(keys, key, value, slots, value_cache=values, **made)
    count, starts = torch.tensor([num_tokens]), torch.tensor([0, num_tokens])
    attended = torch_frontend.paged_attention(
        query,
        keys,
        count.int(),
        slots[None],
        starts.int(),
        torch.ones(1, dtype=torch.int32),
        scaling,
        sliding_window,
        softcap,
        value_cache=values,
        **options,
    )
    if kind.hadamard is not None:
        attended = torch_frontend.hadamard(attended)
    return attended[None].float(), None


@torch.inference_mode()
def logprobs(model: Any, tokens: Sequence[int], kind: Kind) -> Tensor:
    """The log-probabilities of each next token, ``[num_tokens - 1, vocab_size]``.

    Args:
        model: transformers' model of any family, in float32.
    """
    transformers.AttentionInterface.register("cache_dtypes", partial(attend, kind=kind))
    model.set_attn_implementation("cache_dtypes")
    return model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0].log_softmax(-1)


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, max_new_tokens: int) -> list[tuple[list[int], int]]:
    """The tokens of each question with its greedy answer, and how many are the question's."""
    found = []
    for prompt in PROMPTS:
        tokens = encode(tokenizer, prompt)
        text = model.generate(
            torch.tensor([tokens]), max_new_tokens=max_new_tokens, do_sample=False
        )
        found.append((text[0].tolist(), len(tokens)))
    return found


def rows(model: Any, tokenizer: Any, max_new_tokens: int) -> list[dict[str, Any]]:
    """What the tokens of the answers are predicted with by each kind of cache."""
    texts = answers(model, tokenizer, max_new_tokens)
    head_size = getattr(model.config, "head_dim", None)
    head_size = head_size or model.config.hidden_size // model.config.num_attention_heads
    chosen = [torch.tensor(tokens[start:])[:, None] for tokens, start in texts]
    found: list[dict[str, Any]] = []
    exact: list[Tensor] = []
    for name, kind in CACHES.items():
        predicted = [logprobs(model, tokens, kind)[start - 1 :] for tokens, start in texts]
        exact = exact or predicted
        of_tokens, expected = (
            torch.cat([x.gather(1, i) for x, i in zip(y, chosen, strict=True)])
            for y in (predicted, exact)
        )
        same = torch.cat(
            [x.argmax(-1) == y.argmax(-1) for x, y in zip(predicted, exact, strict=True)]
        )
        difference, count = (of_tokens - expected).abs(), len(same)
        found.append(
            {
                "cache": name,
                "bits": kind.bits(head_size),
                "tokens": count,
                "log_probability": of_tokens.mean().item(),
                "difference": difference.mean().item(),
                "difference_error": (difference.std() / count**0.5).item(),
                "largest_difference": difference.max().item(),
                "same": same.float().mean().item(),
                "same_error": (same.float().std() / count**0.5).item(),
            }
        )
    return found


def table(models: dict[str, list[dict[str, Any]]]) -> str:
    """The rows of each model in Markdown. Behind ± are standard errors, as of independent
    tokens."""
    each = "bits of a number | mean difference | same best token"
    lines = [
        " | ".join(["| cache", *[f"{name}: {each}" for name in models]]) + " |",
        "|---" * (1 + 3 * len(models)) + "|",
    ]
    for of_kind in zip(*models.values(), strict=True):
        line = f"| {of_kind[0]['cache']} |"
        for row in of_kind:
            line += (
                " {bits:.3g} | {difference:.4f} ± {difference_error:.4f} "
                "| {same:.1%} ± {same_error:.1%} |"
            ).format(**row)
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.generate.cache_dtypes")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="of any model of transformers; else SmolLM2"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also put the numbers into it")
    options = parser.parse_args()
    model, tokenizer, name = pretrained(options.model, "float32")
    found = {name: rows(model, tokenizer, options.max_new_tokens)}
    print(table(found))
    if options.json is not None:
        held = json.loads(options.json.read_text()) if options.json.exists() else {}
        models = [
            f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, of_model)) + "\n ]"
            for name, of_model in (held | found).items()
        ]
        options.json.write_text("{\n " + ",\n ".join(models) + "\n}\n")


if __name__ == "__main__":
    main()
