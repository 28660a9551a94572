"""Cache layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from harness.layouts import LAYOUTS
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


CASES = [*_layouts()]
