"""Latent attention, where V is a part of K."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from harness.arrays import QUANTIZED
from harness.layouts import LATENT_LAYOUTS
from tests.cases.case import Case, each_dtype


def _latent() -> Iterator[Case]:
    batches = {
        "decode": (20, 12, ((1, 150), (1, 3))),
        "mixed": (48, 32, ((7, 80), (9, 9), (0, 5), (1, 66))),
        "long": (40, 40, ((1, 700), (3, 1100), (30, 530))),
        "deepseek": (576, 512, ((1, 70), (2, 21))),
    }
    for name, (head_size, value_head_size, sequences) in batches.items():
        yield from each_dtype(
            f"latent-{name}",
            sequences=sequences,
            value_head_size=value_head_size,
            num_heads=16,
            num_kv_heads=1,
            block_size=8,
            head_size=head_size,
            return_lse=name == "mixed",
        )
    for layout, cache_dtype in product(LATENT_LAYOUTS, (None, *QUANTIZED)):
        yield from each_dtype(
            f"latent-{layout}-{cache_dtype}",
            sequences=batches["mixed"][2],
            value_head_size=16,
            num_heads=6,
            num_kv_heads=2 if "h" in layout else 1,
            head_size=32,
            kv_layout=layout,
            cache_dtype=cache_dtype,
            scales="per position" if cache_dtype else None,
        )
    features: dict[str, dict[str, Any]] = {
        "window-9-cap-5": {"sliding_window": 9, "soft_cap": 5.0},
        "not-causal": {"causal": False, "window_right": 20},
        "sinks-and-alibi": {"sinks": True, "alibi_slopes": True},
        "tree": {"tree": "draft"},
        "nan": {"nan_in_last_position": True},
    }
    for feature, fields in features.items():
        yield from each_dtype(
            f"latent-{feature}",
            sequences=((7, 80), (9, 9), (1, 66)),
            value_head_size=17,
            num_heads=5,
            num_kv_heads=1,
            head_size=24,
            return_lse=True,
            **fields,
        )


CASES = [*_latent()]
