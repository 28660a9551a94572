"""Caches of 8 and 4 bits, and their scales."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from harness import layouts
from harness.arrays import QUANTIZED, SCALE_DTYPES, unpacked
from harness.layouts import SEPARATE_LAYOUTS
from harness.reference import scale_factors
from tests.cases.case import (
    CHUNKED,
    INT8_NVFP4,
    MIXED,
    MXFP4,
    NVFP4,
    SCALES,
    Case,
    Groups,
    Inputs,
    each_dtype,
)

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


def _groups() -> Iterator[Case]:
    """Scales of groups, and codes of e2m1."""
    formats: dict[str, dict[str, Any]] = {
        "nvfp4": NVFP4,
        "mxfp4": MXFP4,
        "int4-g32": {"cache_dtype": "int4", "groups": Groups(32, "float16")},
        "int8-g32": {"cache_dtype": "int8", "groups": Groups(32, "bfloat16")},
        "float8_e4m3fn-g16": {"cache_dtype": "float8_e4m3fn", "groups": Groups(16)},
    }
    common: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 3, "block_size": 8, "head_size": 64}
    for (name, fields), (batch, (_, sequences)) in product(
        (formats | {"int8-nvfp4": INT8_NVFP4}).items(), BATCHES.items()
    ):
        lse = {"return_lse": batch == "mixed"}
        yield from each_dtype(f"{name}-{batch}", sequences=sequences, **common | fields | lse)
    for scales in SCALES:
        yield from each_dtype(
            f"e2m1-{scales}", sequences=MIXED, cache_dtype="e2m1", scales=scales, head_size=24
        )
    for dtype, has_globals in product(SCALE_DTYPES, (False, True)):
        for head_size, size in ((24, 24), (36, 12), (8, 2), (96, 32), (160, 80)):
            yield Case(
                id=f"groups-of-{size}-of-{head_size}-{dtype}-{has_globals}",
                sequences=MIXED,
                cache_dtype=("int4", "e2m1")[has_globals],
                groups=Groups(size, dtype, has_globals),
                head_size=head_size,
                soft_cap=4.0,
                dtype="bfloat16",
            )
    features: dict[str, dict[str, Any]] = {
        "window-9-sinks": {"sliding_window": 9, "sinks": True},
        "tree": {"tree": "draft"},
        "slopes": {"alibi_slopes": True},
        "images": {"ranges": "blocks"},
        "not-causal": {"causal": False},
        "many-queries": {"num_heads": 40, "sequences": ((30, 300), (1, 40))},
        "chunked": {"sequences": CHUNKED, "block_size": 5},
        "later-nan": {"sequences": ((9, 9), (70, 70)), "nan_in_last_position": True},
        "latent": {"num_kv_heads": 1, "value_head_size": 40, "num_heads": 5, "kv_layout": "nbd"},
        **{layout: {"kv_layout": layout} for layout in ("2nbhd", "n2hbd", "nhb(2d)", "hnbd")},
    }
    for (feature, fields), name in product(features.items(), ("nvfp4", "int4-g32")):
        yield Case(
            id=f"{name}-{feature}",
            **{"sequences": MIXED, "head_size": 64, "dtype": "float16"} | formats[name] | fields,
        )
    for head_size, columns in ((64, 32), (192, 128), (36, 24)):
        yield Case(
            id=f"int8-e2m1-groups-{head_size}-{columns}",
            sequences=((70, 90), *MIXED),
            cache_dtype="int8",
            value_cache_dtype="e2m1",
            groups=Groups(12 if columns == 24 else 16, "float16"),
            kv_layout="hnbd",
            head_size=head_size,
            own_value_head_size=columns,
        )


CASES = [*_one_dtype(), *_int4(), *_two_dtypes(), *_groups()]
INT4_CASES = [case for case in CASES if "int4" in (case.cache_dtype, case.value_cache_dtype)]
GROUP_CASES = [
    case
    for case in CASES
    # A float32 scale of a whole row is one of a position, whose kernels may have products of 16 bits.
    if case.multiplies_rows() and case.groups not in (None, Groups(case.head_size))
]


def with_products(
    inputs: Inputs, attributes: dict[str, Any], dtype: Any = np.float32
) -> tuple[Inputs, dict[str, Any]]:
    """The same call with what the numbers and scales of a cache stand for, in two arrays of a dtype
    that can hold it. It is that of the query, too."""
    values = attributes.get("value_cache")
    is_latent = "value_head_size" in attributes
    others = dict(attributes)
    names = ("k_scale", "v_scale", "k_global", "v_global")
    k_scale, v_scale, k_global, v_global = (others.pop(name, None) for name in names)
    codes, kv_layout = others.pop("codes", None), others.pop("kv_layout", None)
    caches = (inputs.kv_cache,) if values is None else (inputs.kv_cache, values)
    cache = layouts.default(caches, kv_layout, is_latent=is_latent, codes=codes)
    columns = cache.shape[-1] if values is None else unpacked(values, codes).shape[-1]
    keys, rows = cache[:, :, 0::2].astype(np.float32), np.indices(cache.shape[:2])
    keys *= scale_factors((*rows,), k_scale, k_global, keys.shape[-1])
    inputs = inputs._replace(kv_cache=keys.astype(dtype), query=inputs.query.astype(dtype))
    np.testing.assert_array_equal(inputs.kv_cache.astype(np.float32), keys)
    if is_latent:
        return inputs, others | {"kv_layout": "nbhd"}
    found = cache[:, :, 1::2, :columns].astype(np.float32)
    found *= scale_factors((*rows,), v_scale, v_global, columns)
    values = found.astype(dtype)
    np.testing.assert_array_equal(values.astype(np.float32), found)
    return inputs, others | {"value_cache": values}


def in_int8(inputs: Inputs, attributes: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """The same call with int8 in place of int4."""
    values = {k: unpacked(x) for k, x in attributes.items() if k == "value_cache"}
    return inputs._replace(kv_cache=unpacked(inputs.kv_cache)), attributes | values
