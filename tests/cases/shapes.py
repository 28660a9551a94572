"""Shapes: batches, block sizes, context lengths, heads, head sizes, bounds on query lengths, and
queries that are longer than a query tile."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import numpy as np

from harness.arrays import CACHE_DTYPES
from tests.cases.case import CHUNKED, DECODE, MIXED, PREFILL, SHORT_NAMES, Case, each_dtype


def _batches() -> Iterator[Case]:
    batches = {
        "decode": DECODE,
        "prefill": PREFILL,
        "chunked-prefill": CHUNKED,
        "mixed": MIXED,
        "one-token": ((1, 1),),
        "no-query-tokens": ((0, 3), (0, 9)),
        "empty-context": ((0, 0), (2, 2), (0, 0)),
        "only-empty-context": ((0, 0), (0, 0)),
        "no-sequences": (),
        "long-beside-short": ((1, 290), (1, 2), (40, 90)),
    }
    for name, sequences in batches.items():
        yield from each_dtype(name, sequences=sequences)
    no_padding = {"padding_seqs": 0, "padding_blocks": 0, "padding_tokens": 0}
    yield from each_dtype("no-padding", sequences=MIXED, **no_padding)
    yield from each_dtype("much-padding", sequences=MIXED, padding_seqs=20, padding_tokens=50)
    yield from each_dtype("first-token-5", sequences=MIXED, first_token=5)
    yield from each_dtype("num-seqs-of-rank-1", sequences=MIXED, num_seqs_shape=(1,))
    yield from each_dtype("shared-first-block", sequences=CHUNKED, shared_blocks=1)


def _block_sizes_and_contexts() -> Iterator[Case]:
    for block_size in (1, 2, 3, 8, 16, 17, 32, 64, 100, 128, 256):
        around = sorted({1, max(1, block_size - 1), block_size, block_size + 1, 2 * block_size})
        decode = tuple((1, length) for length in around)
        yield from each_dtype(f"block-{block_size}-decode", sequences=decode, block_size=block_size)
        chunked = tuple((min(3, length), length) for length in around)
        yield from each_dtype(
            f"block-{block_size}-chunked", sequences=chunked, block_size=block_size, head_size=8
        )
    for length in (63, 64, 65, 127, 128, 129):  # the CPU kernel's tile has 64 positions
        for q_len in (1, 5, min(66, length)):
            yield from each_dtype(
                f"context-{length}-query-{q_len}",
                sequences=((q_len, length), (1, 3)),
                block_size=16,
                head_size=8,
                num_heads=2,
            )
    yield from each_dtype(
        "context-2000",
        sequences=((1, 2000), (2, 1025)),
        num_heads=8,
        head_size=64,
        block_size=16,
    )


def _heads() -> Iterator[Case]:
    for num_kv_heads, group in product((1, 2, 3, 5), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)):
        for dtype in ("float32", "bfloat16"):
            yield Case(
                id=f"kv{num_kv_heads}-gqa{group}-{SHORT_NAMES[dtype]}",
                sequences=((1, 11), (3, 6)),
                num_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                head_size=8,
                dtype=dtype,
            )
    for head_size in (1, 2, 3, 7, 8, 16, 17, 32, 40, 64, 80, 96, 112, 120, 128, 192, 256, 512):
        yield from each_dtype(
            f"head-size-{head_size}", sequences=((1, 19), (3, 5)), head_size=head_size
        )


def _max_query_lens() -> Iterator[Case]:
    batches = {
        1: ((1, 700), (1, 3), (0, 5), (1, 1)),
        3: ((3, 600), (2, 9), (1, 70)),
        100: ((40, 330), (1, 70)),
    }
    for (max_query_len, sequences), head_size in product(batches.items(), (64, 160)):
        yield from each_dtype(
            f"max-query-len-{max_query_len}-head-size-{head_size}",
            sequences=sequences,
            max_query_len=max_query_len,
            num_heads=10,
            num_kv_heads=2,
            head_size=head_size,
            padding_tokens=20,
        )
    for cache_dtype in CACHE_DTYPES:
        yield Case(
            id=f"max-query-len-{cache_dtype}",
            sequences=batches[3],
            max_query_len=3,
            num_heads=10,
            head_size=128,
            cache_dtype=cache_dtype,
            scales="per position",
            dtype="float16",
        )


def _ragged() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for i in range(60):
        sequences = []
        for _ in range(int(rng.integers(1, 6))):
            context = int(rng.integers(0, 100))
            sequences.append((int(rng.integers(0, min(context, 8) + 1)), context))
        num_kv_heads = int(rng.integers(1, 4))
        yield from each_dtype(
            f"ragged-{i}",
            sequences=tuple(sequences),
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * int(rng.integers(1, 5)),
            head_size=int(rng.integers(1, 50)),
            block_size=int(rng.integers(1, 40)),
            sliding_window=int(rng.integers(1, 90)) if i % 3 == 0 else None,
            soft_cap=20.0 if i % 4 == 0 else None,
            first_token=i % 5,
        )


def _shared_prefixes() -> Iterator[Case]:
    """Neighbouring sequences whose tables begin alike, over whole splits of the CPU kernel."""
    features: dict[str, dict[str, Any]] = {
        "plain": {},
        "window-1050": {"sliding_window": 1050},
        "tree": {"tree": "draft"},
        "sinks-cap": {"sinks": True, "soft_cap": 20.0},
        "alibi": {"alibi_slopes": True},
        "not-causal": {"causal": False, "window_right": 2},
        "int8": {"cache_dtype": "int8", "scales": "per position"},
        "latent": {"value_head_size": 12, "num_kv_heads": 1},
    }
    for feature, fields in features.items():
        yield from each_dtype(
            f"shared-prefix-{feature}",
            sequences=((1, 1100), (1, 1025), (3, 1300), (2, 1024), (0, 1300), (1, 600), (30, 1090)),
            num_heads=6,
            block_size=8,
            return_lse=True,
            shared_blocks=130,
            **fields,
        )


def _long_queries() -> Iterator[Case]:
    """Queries with more tokens than a query tile of the CUDA kernels, so that the prefill kernel may
    run. Contexts have many KV tiles. Short queries are in the same batch."""
    batches = {
        "prompts": ((130, 130), (1, 200), (65, 65), (300, 300)),
        "chunks": ((100, 385), (66, 128), (20, 129), (0, 40), (129, 520)),
    }
    features: dict[str, dict[str, Any]] = {
        "window-1": {"sliding_window": 1},
        "window-90": {"sliding_window": 90},
        "window-128-cap-5": {"sliding_window": 128, "soft_cap": 5.0},
        "sinks": {"sinks": True},
        "alibi": {"alibi_slopes": True},
        "not-causal": {"causal": False},
        "window-40-right-200": {"causal": False, "sliding_window": 40, "window_right": 200},
        "large-logits": {"query_factor": 30.0},
        "negative-scale": {"scale": -0.3},
        "hint": {"max_query_len": 300},
        "shared-prefix": {"shared_blocks": 20},
        "layout-n2hbd": {"kv_layout": "n2hbd"},
        "all": {
            "sinks": True,
            "alibi_slopes": True,
            "causal": False,
            "window_right": 20,
            "sliding_window": 150,
            "soft_cap": 5.0,
        },
        "by-sequence": {"causal": False, "causal_seqs": True},
        "images": {"ranges": "blocks"},
        "ranges-window-90": {"ranges": "any", "sliding_window": 90},
    }
    shorts = {dtype: short for dtype, short in SHORT_NAMES.items() if dtype != "float32"}
    sizes = product((8, 64, 80, 128), ((1, 1), (2, 3), (1, 4), (1, 8)))
    larger = product((144, 192, 512), ((1, 2), (1, 5)))
    for i, (head_size, (num_kv_heads, group)) in enumerate(chain(sizes, larger)):
        dtype = "float16" if head_size == 80 else "bfloat16"
        yield Case(
            id=f"long-head-size-{head_size}-gqa{group}-{shorts[dtype]}",
            sequences=[*batches.values()][(i + i // 4) % 2],
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * group,
            head_size=head_size,
            block_size=16,
            dtype=dtype,
            return_lse=True,
        )
    for i, (feature, fields) in enumerate(features.items()):
        both = zip(shorts.items(), batches.items(), strict=True)
        for (dtype, short), (name, sequences) in both:
            yield Case(
                id=f"long-{name}-{feature}-{short}",
                sequences=sequences,
                num_heads=6,
                block_size=(1, 7, 16, 64, 100, 256)[i % 6],
                head_size=(64, 128, 72)[i % 3],
                dtype=dtype,
                return_lse=True,
                **fields,
            )
    for (dtype, short), length in product(shorts.items(), (65, 127, 128, 129, 200, 256, 257)):
        yield Case(
            id=f"long-later-token-nan-{length}-{short}",
            sequences=((length, length), (70, length + 5)),
            nan_in_last_position=True,
            sliding_window=100 if length == 200 else None,
            head_size=64 if length % 2 else 128,
            num_heads=2,
            block_size=16,
            dtype=dtype,
        )
    for i, (cache_dtype, feature) in enumerate(product(CACHE_DTYPES, features)):
        dtype, short = [*shorts.items()][i % 2]
        yield Case(
            id=f"long-{cache_dtype}-{feature}-{short}",
            sequences=[*batches.values()][i // 2 % 2],
            num_heads=6,
            block_size=(1, 7, 16, 64, 100, 256)[i % 6],
            head_size=(64, 128, 80, 16)[i % 4],
            dtype=dtype,
            cache_dtype=cache_dtype,
            scales=(None, "one", "per head")[i % 3],
            return_lse=True,
            **features[feature],
        )
    for cache_dtype, length in product(("float8_e4m3fn", "float8_e5m2"), (65, 129, 200)):
        yield Case(
            id=f"long-{cache_dtype}-later-token-nan-{length}",
            sequences=((length, length), (70, length + 5)),
            nan_in_last_position=True,
            head_size=64 if length % 2 else 128,
            block_size=16,
            dtype="bfloat16",
            cache_dtype=cache_dtype,
            scales="per head",
        )
    yield Case(
        id="long-later-token-nan-gqa64",
        sequences=((4, 200), (3, 130)),
        nan_in_last_position=True,
        num_heads=64,
        num_kv_heads=1,
        block_size=16,
        dtype="bfloat16",
    )
    for group in (100, 130):
        yield Case(
            id=f"long-gqa{group}",
            sequences=((3, 200), (2, 2)),
            num_heads=group,
            num_kv_heads=1,
            dtype="bfloat16",
        )
    yield Case(
        id="long-beside-splits",
        sequences=((100, 130), (3, 700), (1, 600), (22, 300)),
        num_heads=6,
        dtype="bfloat16",
    )
    yield Case(
        id="long-float8_e4m3fn-beside-splits",
        sequences=((100, 130), (3, 700), (1, 600), (22, 300)),
        num_heads=6,
        dtype="bfloat16",
        cache_dtype="float8_e4m3fn",
        scales="per head",
    )
    yield Case(
        id="long-latent-int8",
        sequences=((100, 130), (70, 300)),
        num_heads=6,
        num_kv_heads=1,
        head_size=96,
        value_head_size=64,
        kv_layout="nbd",
        dtype="float16",
        cache_dtype="int8",
        scales="one",
    )
    yield Case(
        id="long-fewer-keys-int8",
        sequences=((200, 20), (150, 0), (70, 200)),
        causal=False,
        sinks=True,
        return_lse=True,
        dtype="bfloat16",
        cache_dtype="int8",
        scales="one",
    )
    yield Case(
        id="long-fewer-keys",
        sequences=((200, 20), (150, 0), (70, 200)),
        causal=False,
        sinks=True,
        return_lse=True,
        dtype="float16",
    )


CASES = [
    *_batches(),
    *_block_sizes_and_contexts(),
    *_heads(),
    *_max_query_lens(),
    *_ragged(),
    *_shared_prefixes(),
]
LONG_CASES = [*_long_queries()]
