"""Masks: sliding windows, attention that is not causal, trees, ranges, and NaN in masked positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from tests.cases.case import MIXED, RANGES, TREES, Case, each_dtype, feature_cases


def _sliding_windows() -> Iterator[Case]:
    batches = {"decode": ((1, 150), (1, 3)), "mixed": ((7, 80), (9, 9), (1, 66))}
    for window, (name, sequences) in product((1, 2, 8, 9, 63, 64, 65, 1000), batches.items()):
        yield from each_dtype(
            f"window-{window}-{name}",
            sequences=sequences,
            block_size=8,
            head_size=8,
            sliding_window=window,
        )
    yield from each_dtype(
        "window-20-cap-5", sequences=batches["mixed"], sliding_window=20, soft_cap=5.0
    )
    yield from each_dtype("largest-window", sequences=MIXED, sliding_window=2**63 - 1)


def _not_causal() -> Iterator[Case]:
    features: dict[str, dict[str, Any]] = {
        "not-causal": {},
        "right-0": {"window_right": 0},
        "right-3": {"window_right": 3},
        "window-9-right-70": {"sliding_window": 9, "window_right": 70},
        "alibi-not-causal": {"alibi_slopes": True},
        "all": {
            "sinks": True,
            "alibi_slopes": True,
            "window_right": 20,
            "sliding_window": 300,
            "soft_cap": 5.0,
        },
    }
    for name in ("not-causal", "right-3", "window-9-right-70", "all"):
        features[f"{name}-by-sequence"] = features[name] | {"causal_seqs": True}
    yield from feature_cases({name: {"causal": False} | x for name, x in features.items()})
    # More queries than keys, as where devices share the cache.
    fewer = ((5, 2), (3, 0), (1, 0), (40, 0), (4, 9), (90, 20))
    with_fewer: dict[str, dict[str, Any]] = {
        "lse": {},
        "sinks": {"sinks": True},
        "alibi": {"alibi_slopes": True},
    }
    for (feature, fields), right in product(with_fewer.items(), (None, 0, 2)):
        yield from each_dtype(
            f"fewer-keys-{feature}-right-{right}",
            sequences=fewer,
            return_lse=True,
            causal=False,
            window_right=right,
            **fields,
        )
    yield from each_dtype(
        "fewer-keys-by-sequence",
        sequences=((9, 9), (5, 2), (3, 12), (3, 0), (1, 1), (40, 0), (64, 80), (90, 20)),
        return_lse=True,
        causal=False,
        causal_seqs=True,
    )


def _tree_masks() -> Iterator[Case]:
    trees: dict[str, tuple[tuple[int, int], ...]] = {
        "decode": ((7, 150), (1, 3), (2, 2), (13, 13)),
        "wide": ((64, 190), (65, 70), (64, 64), (0, 5)),
        "long": ((12, 700), (9, 1100), (33, 530)),
    }
    for tree, (name, sequences) in product(TREES[1:], trees.items()):
        yield from each_dtype(
            f"tree-{tree}-{name}",
            sequences=sequences,
            tree=tree,
            num_heads=6,
            block_size=8,
            head_size=24,
            sinks=name == "wide",
            sliding_window=66 if name == "long" else None,
            soft_cap=5.0 if name == "long" else None,
            return_lse=name == "wide",
        )
    for tree, cache_dtype in product(TREES[1:], (None, "float8_e4m3fn", "int8")):
        yield from each_dtype(
            f"tree-{tree}-nan-{cache_dtype}",
            sequences=((3, 40), (9, 70), (6, 38), (12, 12), (40, 41)),
            tree=tree,
            cache_dtype=cache_dtype,
            scales=None if cache_dtype is None else "per position",
            query_factor=8.0,
            nan_in_second_query=True,
        )


def _bidirectional_ranges() -> Iterator[Case]:
    batches: dict[str, tuple[tuple[int, int], ...]] = {
        "mixed": ((7, 80), (19, 30), (0, 5), (1, 66)),
        "long": ((3, 1100), (40, 700), (1, 530)),
        "prompts": ((130, 130), (65, 300)),
    }
    for ranges, window, (name, sequences) in product(RANGES[1:], (None, 9), batches.items()):
        yield from each_dtype(
            f"ranges-{ranges}-window-{window}-{name}",
            sequences=sequences,
            ranges=ranges,
            num_heads=6,
            block_size=8,
            head_size=64 if name == "prompts" else 24,
            sliding_window=window,
            sinks=name == "long",
            alibi_slopes=name == "mixed",
            soft_cap=5.0 if name == "long" else None,
            cache_dtype="int8" if name == "prompts" and window else None,
            return_lse=name != "prompts",
        )
    features: dict[str, dict[str, Any]] = {
        "fewer-keys": {"sequences": ((5, 2), (40, 0), (90, 20)), "window_right": 0},
        "by-sequence": {"sequences": ((30, 70), (30, 70), (2, 300)), "causal_seqs": True},
    }
    for name, fields in features.items():
        yield from each_dtype(
            f"ranges-{name}", ranges="any", causal=False, sliding_window=20, **fields
        )


def _nan_in_masked_positions() -> Iterator[Case]:
    for length in (2, 16, 17, 63, 64, 65, 70):
        yield from each_dtype(
            f"later-token-nan-prefill-{length}",
            sequences=((length, length),),
            nan_in_last_position=True,
            num_heads=2,
        )
    yield from each_dtype(
        "later-token-nan-chunked",
        sequences=((5, 69), (3, 9)),
        sliding_window=66,
        nan_in_last_position=True,
    )


CASES = [
    *_sliding_windows(),
    *_not_causal(),
    *_tree_masks(),
    *_bidirectional_ranges(),
    *_nan_in_masked_positions(),
]
