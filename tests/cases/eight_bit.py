"""8-bit caches and their scales."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from harness.arrays import CACHE_DTYPES
from tests.cases.case import MIXED, SCALES, Case, each_dtype


def _eight_bit() -> Iterator[Case]:
    batches = {
        "decode": (24, ((1, 150), (1, 3))),
        "mixed": (32, ((7, 80), (9, 9), (0, 5), (1, 66))),
        "long": (112, ((1, 700), (5, 530))),
    }
    for cache_dtype, scales in product(CACHE_DTYPES, SCALES):
        for name, (head_size, sequences) in batches.items():
            yield from each_dtype(
                f"{cache_dtype}-{scales}-{name}",
                sequences=sequences,
                cache_dtype=cache_dtype,
                scales=scales,
                num_heads=12,
                num_kv_heads=3,
                block_size=8,
                head_size=head_size,
                return_lse=name == "mixed",
            )
    for cache_dtype, head_size in product(CACHE_DTYPES, (1, 7, 64, 100, 192)):
        yield Case(
            id=f"{cache_dtype}-head-size-{head_size}",
            sequences=MIXED,
            cache_dtype=cache_dtype,
            scales="per position",
            head_size=head_size,
            soft_cap=4.0,
            dtype="bfloat16",
        )
    for cache_dtype in ("float8_e4m3fn", "float8_e5m2"):
        yield from each_dtype(
            f"{cache_dtype}-later-token-nan",
            sequences=((9, 9), (70, 70)),
            cache_dtype=cache_dtype,
            nan_in_last_position=True,
        )
    for cache_dtype in CACHE_DTYPES:
        yield from each_dtype(
            f"{cache_dtype}-later-scale-nan",
            sequences=((9, 9), (70, 70)),
            cache_dtype=cache_dtype,
            scales="per position",
            nan_in_last_position=True,
        )
    for layout in ("n2hbd", "nbhd"):
        yield Case(
            id=f"float8-layout-{layout}",
            sequences=MIXED,
            cache_dtype="float8_e4m3fn",
            scales="per head",
            kv_layout=layout,
            sinks=True,
            alibi_slopes=True,
            dtype="bfloat16",
        )


CASES = [*_eight_bit()]
