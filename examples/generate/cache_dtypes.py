"""What a cache of fewer bits costs in accuracy: ``python -m examples.generate.cache_dtypes``.

The model answers the questions of ``examples.generate``, and each token of the answers is then
predicted with each kind of cache. Weights and arithmetic are float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_frontend  # noqa: F401  (defines torch.ops.xla_gpu)
from examples.generate.run import PROMPTS
from shared_ffi.batch import Batch
from xla_paged_attention.engine.checkpoint import Checkpoint, load
from xla_paged_attention.engine.llama_torch import Llama, Rope, rotate

INT4 = torch.uint8  # two numbers in an element
NVFP4 = "nvfp4"  # two numbers of e2m1 in an element of uint8, and scales of groups of 16
SCALED = (torch.float8_e4m3fn, torch.int8, INT4)
CACHES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": (torch.int8, torch.int8),
    "int8 K, int4 V": (torch.int8, INT4),
    "int4 K, int8 V": (INT4, torch.int8),
    "int4": (INT4, INT4),
    "NVFP4": (NVFP4, NVFP4),
    "int8 K, NVFP4 V": (torch.int8, NVFP4),
}
"""The dtypes of K and V, or NVFP4."""


class Cache(NamedTuple):
    """K and V of a layer, a block for each token, and the scales of each head of a token."""

    arrays: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]

    @classmethod
    def empty(cls, num_tokens: int, num_heads: int, head_size: int, *dtypes: Any) -> Cache:
        """A cache with scales of 1."""
        shape = (num_tokens, 1, num_heads)
        arrays, scales = [], []
        for dtype in dtypes:
            size = head_size // (2 if dtype in (INT4, NVFP4) else 1)
            stored = torch.uint8 if dtype == NVFP4 else dtype
            arrays.append(torch.zeros(*shape, size, dtype=stored))
            ones = torch.ones(*shape, head_size // 16).to(torch.float8_e4m3fn)
            scales.append(ones if dtype == NVFP4 else torch.ones(shape))
        return cls((arrays[0], arrays[1]), (scales[0], scales[1]))

    def codes(self) -> dict[str, Any]:
        """What the calls must be told about numbers of 4 bits."""
        return {"codes": "e2m1"} if any(x.ndim == 4 for x in self.scales) else {}


def attend(
    query: Tensor, key: Tensor, value: Tensor, rope: Rope, cache: Cache, batch: Batch
) -> Tensor:
    """As ``llama_torch.Attention.attend``, with the scale of each head of each token."""
    query, key = rotate(query, rope), rotate(key, rope)
    keys, values = cache.arrays
    made: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if keys.dtype in SCALED:
        made = {"k_scale_cache": cache.scales[0], "v_scale_cache": cache.scales[1]}
        options = {"k_scale": cache.scales[0], "v_scale": cache.scales[1], **cache.codes()}
        made |= cache.codes()
    dtype = torch.float32 if options else keys.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ops, slots = torch.ops.xla_gpu, batch.slot_mapping
    ops.kv_cache_update(keys, key, value, slots, value_cache=values, **made)
    scale = query.shape[-1] ** -0.5
    metadata = batch[3:]
    attended = ops.paged_attention(query, keys, *metadata, scale, value_cache=values, **options)
    return attended.float()


def model_of(checkpoint: Checkpoint) -> Llama:
    """The model with `attend` in each layer."""
    model = Llama(checkpoint.config, checkpoint.weights)
    layer: Any
    for layer in model.layers:
        layer.self_attn.attend = attend
    return model


@torch.inference_mode()
def logprobs(model: Llama, tokens: Sequence[int], *dtypes: Any) -> Tensor:
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
        Cache.empty(num_tokens, config.num_kv_heads, config.head_size, *dtypes)
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m examples.generate.cache_dtypes")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="as in examples.generate")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer at most")
    options = parser.parse_args()
    checkpoint = load(options.model, "float32")
    texts = answers(checkpoint, options.max_new_tokens)
    model = model_of(checkpoint)
    print(
        "| cache | bytes of a head's K and V | mean log-probability | mean difference "
        "| largest difference | same best token |"
    )
    print("|---|---|---|---|---|---|")
    exact: list[Tensor] = []
    for name, dtypes in CACHES.items():
        rows = [logprobs(model, tokens, *dtypes)[start - 1 :] for tokens, start in texts]
        exact = exact or rows
        chosen = [torch.tensor(tokens[start:])[:, None] for tokens, start in texts]
        found, expected = (
            torch.cat([x.gather(1, i) for x, i in zip(y, chosen, strict=True)])
            for y in (rows, exact)
        )
        difference = (found - expected).abs()
        same = torch.cat([x.argmax(-1) == y.argmax(-1) for x, y in zip(rows, exact, strict=True)])
        one = Cache.empty(1, 1, checkpoint.config.head_size, *dtypes)
        num_bytes = sum(x.nbytes for x in one.arrays)
        num_bytes += sum(
            x.nbytes
            for x, dtype in zip(one.scales, dtypes, strict=True)
            if dtype in (NVFP4, *SCALED)
        )
        print(
            f"| {name} | {num_bytes} | {found.mean():.4f} | {difference.mean():.4f} "
            f"| {difference.max():.3f} | {same.float().mean():.1%} |"
        )


if __name__ == "__main__":
    main()
