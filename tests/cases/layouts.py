"""Cache layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from harness.arrays import QUANTIZED
from harness.layouts import LAYOUTS, SEPARATE_LAYOUTS
from tests.cases.case import MIXED, Case, each_dtype


def _layouts() -> Iterator[Case]:
    batches = {
        "mixed": ((7, 80), (9, 9), (0, 5), (1, 66)),
        "long": ((1, 700), (3, 1100)),
    }
    for layout, (name, sequences) in product(LAYOUTS, batches.items()):
        yield from each_dtype(
            f"layout-{layout}-{name}",
            sequences=sequences,
            kv_layout=layout,
            num_heads=12,
            num_kv_heads=3,
            block_size=8 if name == "mixed" else 5,
            head_size=24,
            sliding_window=70 if name == "mixed" else None,
        )
    # Rows of 4 bytes, which are adjacent only in some layouts.
    for layout in LAYOUTS:
        yield Case(
            id=f"layout-{layout}-thin",
            sequences=MIXED,
            kv_layout=layout,
            head_size=1,
            num_kv_heads=1,
        )


def _value_head_sizes() -> Iterator[Case]:
    """V in an array of its own, with a head size of its own."""
    sizes = ((24, 16), (192, 128), (17, 5), (128, 64), (40, 39))
    batches = {
        "mixed": ((7, 80), (9, 9), (0, 5), (1, 66)),
        "long": ((1, 700), (3, 1100), (25, 530)),
    }
    for i, ((head_size, columns), (name, sequences)) in enumerate(product(sizes, batches.items())):
        yield from each_dtype(
            f"own-value-head-size-{head_size}-{columns}-{name}",
            sequences=sequences,
            kv_layout=SEPARATE_LAYOUTS[i % 3],
            own_value_head_size=columns,
            num_heads=(6, 40)[i // 2 % 2],
            block_size=8 if name == "mixed" else 5,
            head_size=head_size,
            return_lse=name == "mixed",
        )
    features: dict[str, dict[str, Any]] = {
        "window-9-cap-5": {"sliding_window": 9, "soft_cap": 5.0},
        "sinks-and-alibi": {"sinks": True, "alibi_slopes": True},
        "tree": {"tree": "draft"},
        "images": {"ranges": "blocks"},
        "nan": {"nan_in_last_position": True},
        "one-block": {"block_size": 128},
    }
    for cache_dtype in QUANTIZED:
        features[cache_dtype] = {"cache_dtype": cache_dtype, "scales": "per position"}
        features[f"{cache_dtype}-uniform"] = {"cache_dtype": cache_dtype, "scales": "per head"}
    for i, (feature, fields) in enumerate(features.items()):
        yield from each_dtype(
            f"own-value-head-size-{feature}",
            sequences=((7, 80), (9, 9), (1, 66), (100, 120)),
            kv_layout=SEPARATE_LAYOUTS[i % 3],
            own_value_head_size=32,
            head_size=48,
            return_lse=True,
            **fields,
        )


CASES = [*_layouts(), *_value_head_sizes()]
