"""Caches of 8 and 4 bits, and their scales."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from harness.arrays import QUANTIZED, unpacked
from harness.layouts import SEPARATE_LAYOUTS
from tests.cases.case import CHUNKED, MIXED, SCALES, Case, Inputs, each_dtype

BATCHES = {
    "decode": (24, ((1, 150), (1, 3))),
    "mixed": (32, ((7, 80), (9, 9), (0, 5), (1, 66))),
    "long": (112, ((1, 700), (5, 530))),
}


def _one_dtype() -> Iterator[Case]:
    for cache_dtype, scales in product(QUANTIZED, SCALES):
        for name, (head_size, sequences) in BATCHES.items():
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
    for cache_dtype, head_size in product(QUANTIZED, (1, 2, 7, 18, 64, 80, 96, 100, 128, 192)):
        if cache_dtype == "int4" and head_size % 2 != 0:
            continue
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
    for cache_dtype in QUANTIZED:
        yield from each_dtype(
            f"{cache_dtype}-later-scale-nan",
            sequences=((9, 9), (70, 70)),
            cache_dtype=cache_dtype,
            scales="per position",
            nan_in_last_position=True,
        )
    for cache_dtype, layout in (
        *product(("float8_e4m3fn",), ("n2hbd", "nbhd")),
        *product(("int4",), ("2nbhd", "n2hbd", "nhb(2d)", "nhbd")),
    ):
        yield Case(
            id=f"{cache_dtype}-layout-{layout}",
            sequences=MIXED,
            cache_dtype=cache_dtype,
            scales="per head",
            kv_layout=layout,
            sinks=True,
            alibi_slopes=True,
            dtype="bfloat16",
        )


def _int4() -> Iterator[Case]:
    """What the products do with int8 that was int4 a moment before."""
    features: dict[str, dict[str, Any]] = {
        "window-9-cap-5": {"sliding_window": 9, "soft_cap": 5.0},
        "one-block": {"block_size": 128},
        "tree": {"tree": "draft"},
        "images": {"ranges": "blocks"},
        "not-causal": {"causal": False},
        "many-queries": {"num_heads": 40, "sequences": ((30, 300), (1, 40))},
        "one-query-head": {"num_heads": 2, "head_size": 128},
        "chunked": {"sequences": CHUNKED, "block_size": 5},
    }
    for feature, fields in features.items():
        common = {"sequences": MIXED, "cache_dtype": "int4", "scales": "per head", "head_size": 64}
        yield from each_dtype(f"int4-{feature}", **common | fields)


def _two_dtypes() -> Iterator[Case]:
    """K of int8 with V of int4, and the other way round."""
    pairs = (("int8", "int4"), ("int4", "int8"))
    for (cache_dtype, value_cache_dtype), scales in product(pairs, SCALES):
        for i, (name, (head_size, sequences)) in enumerate(BATCHES.items()):
            yield from each_dtype(
                f"{cache_dtype}-{value_cache_dtype}-{scales}-{name}",
                sequences=sequences,
                cache_dtype=cache_dtype,
                value_cache_dtype=value_cache_dtype,
                scales=scales,
                kv_layout=SEPARATE_LAYOUTS[i],
                num_heads=12,
                num_kv_heads=3,
                block_size=8,
                head_size=head_size,
                return_lse=name == "mixed",
            )
    for (cache_dtype, value_cache_dtype), (head_size, columns) in product(
        pairs, ((64, 32), (192, 128), (18, 6), (128, 126), (256, 256))
    ):
        yield Case(
            id=f"{cache_dtype}-{value_cache_dtype}-head-sizes-{head_size}-{columns}",
            sequences=((70, 90), *MIXED),
            cache_dtype=cache_dtype,
            value_cache_dtype=value_cache_dtype,
            scales="per position",
            kv_layout="nbhd",
            head_size=head_size,
            own_value_head_size=columns,
            dtype="bfloat16",
        )


CASES = [*_one_dtype(), *_int4(), *_two_dtypes()]
INT4_CASES = [case for case in CASES if "int4" in (case.cache_dtype, case.value_cache_dtype)]


def in_int8(inputs: Inputs, attributes: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """The same call with int8 in place of int4."""
    values = {k: unpacked(x) for k, x in attributes.items() if k == "value_cache"}
    return inputs._replace(kv_cache=unpacked(inputs.kv_cache)), attributes | values
