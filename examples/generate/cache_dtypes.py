"""What a cache of fewer bits costs in accuracy: ``python -m examples.generate.cache_dtypes``.

The model answers the questions of ``examples.generate``, and each token of the answers is then
predicted with each kind of cache. Weights and arithmetic are float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_frontend
from examples.generate.run import PROMPTS
from shared_ffi.batch import Batch
from xla_paged_attention.engine.checkpoint import Checkpoint, load
from xla_paged_attention.engine.llama_torch import Llama, Rope, rotated

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

    def bytes_of_head(self, head_size: int) -> int:
        """The bytes of K and V of a head of a token, with their scales."""
        cache = Cache.empty(1, 1, head_size, self)
        are_scaled = [isinstance(x, Grouped) or x in SCALED for x in (self.keys, self.values)]
        scales = [x for x, is_scaled in zip(cache.scales, are_scaled, strict=True) if is_scaled]
        return sum(x.nbytes for x in (*cache.arrays, *scales))


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
    hadamard: str | None

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
        return cls((arrays[0], arrays[1]), (scales[0], scales[1]), codes, kind.hadamard)


def attend(
    query: Tensor, key: Tensor, value: Tensor, rope: Rope, cache: Cache, batch: Batch
) -> Tensor:
    """As ``llama_torch.Attention.attend``, with the scale of each head of each token."""
    query, key = rotated(query, key, rope)
    keys, values = cache.arrays
    made: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if keys.dtype in SCALED:
        codes = {"codes": cache.codes}
        made = {"k_scale_cache": cache.scales[0], "v_scale_cache": cache.scales[1], **codes}
        options = {"k_scale": cache.scales[0], "v_scale": cache.scales[1], **codes}
    dtype = torch.float32 if options else keys.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if cache.hadamard is not None:
        made |= {"hadamard": cache.hadamard, "query": query}
    rows = key, value, batch.slot_mapping
    torch_frontend.kv_cache_update(keys, *rows, value_cache=values, **made)
    scale = query.shape[-1] ** -0.5
    attended = torch_frontend.paged_attention(
        query, keys, *batch[3:], scale, value_cache=values, **options
    )
    return (attended if cache.hadamard is None else torch_frontend.hadamard(attended)).float()


def model_of(checkpoint: Checkpoint) -> Llama:
    """The model with `attend` in each layer."""
    model = Llama(checkpoint.config, checkpoint.weights)
    layer: Any
    for layer in model.layers:
        layer.self_attn.attend = attend
    return model


@torch.inference_mode()
def logprobs(model: Llama, tokens: Sequence[int], kind: Kind) -> Tensor:
    """The log-probabilities of each next token, ``[num_tokens - 1, vocab_size]``: one decoding
    step for all tokens, each a sequence of its own in the blocks of the whole text."""
    num_tokens = len(tokens) - 1
    numbers = torch.arange(num_tokens, dtype=torch.int32)
    batch = Batch(
        tokens=torch.tensor(tokens[:-1]),
        positions=numbers,
        slot_mapping=numbers,
        context_lens=numbers + 1,
        block_tables=numbers.repeat(num_tokens, 1),
        query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32),
        num_seqs=torch.tensor([num_tokens], dtype=torch.int32),
    )
    config = model.config
    caches = [
        Cache.empty(num_tokens, config.num_kv_heads, config.head_size, kind)
        for _ in config.sliding_windows
    ]
    return model(caches, batch).log_softmax(-1)


@torch.inference_mode()
def answers(checkpoint: Checkpoint, max_new_tokens: int) -> list[tuple[list[int], int]]:
    """The tokens of each question with its greedy answer, and how many are the question's."""
    found = []
    for prompt in PROMPTS:
        tokens = checkpoint.encode(prompt)
        text = checkpoint.model.generate(
            torch.tensor([tokens]), max_new_tokens=max_new_tokens, do_sample=False
        )
        found.append((text[0].tolist(), len(tokens)))
    return found


def rows(checkpoint: Checkpoint, max_new_tokens: int) -> list[dict[str, Any]]:
    """What the tokens of the answers are predicted with by each kind of cache."""
    texts = answers(checkpoint, max_new_tokens)
    chosen = [torch.tensor(tokens[start:])[:, None] for tokens, start in texts]
    model = model_of(checkpoint)
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
                "bytes": kind.bytes_of_head(checkpoint.config.head_size),
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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown. Behind ± are standard errors, as of independent tokens."""
    lines = [
        "| cache | bytes of a head's K and V | mean log-probability | mean difference "
        "| largest difference | same best token |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        "| {cache} | {bytes} | {log_probability:.4f} | {difference:.4f} ± {difference_error:.4f} "
        "| {largest_difference:.3f} | {same:.1%} ± {same_error:.1%} |".format(**row)
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.generate.cache_dtypes")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="as in examples.generate")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to it")
    options = parser.parse_args()
    found = rows(load(options.model, "float32"), options.max_new_tokens)
    print(table(found))
    if options.json is not None:
        lines = ",\n  ".join(map(json.dumps, found))
        options.json.write_text(f'{{\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
