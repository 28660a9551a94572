"""Calls that break one rule of the contract each, and the errors that they must raise."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shared_ffi.spec import numbers_of
from tests.support.sound_calls import add, attention, op_of, rotated_update, training, update

F32, F16, I32 = np.float32, np.float16, np.int32
INT8_CACHE = {"kv_cache": np.zeros((4, 2, 4, 8), np.int8)}


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


@dataclass(frozen=True)
class BadCall:
    op: str
    arguments: dict[str, Any]
    error: type[Exception]
    message: str
    id: str = ""


def bad_call(make: Callable[..., dict[str, Any]], message: str, **changes: Any) -> Any:
    """A wrong dtype is a TypeError, and all else a ValueError."""
    arguments = make(**changes)
    op = op_of(arguments)
    error = TypeError if re.match(r"\w+ must have (\w+'s )?dtype ", message) else ValueError
    name = "-".join([op, *(f"{k}={_short(v)}" for k, v in changes.items())])
    return pytest.param(BadCall(op, arguments, error, f"{op}: {message}"), id=name)


def _short(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


# Wrong shapes, dtypes and attributes: found before the call.
STATIC = [
    bad_call(
        attention,
        "query must have shape [num_tokens, num_heads, head_size]; got [4, 8]",
        query=ones(4, 8),
    ),
    bad_call(
        attention,
        "query must have dtype float32, float16 or bfloat16; got int32",
        query=ones(4, 4, 8, dtype=I32),
    ),
    *(
        bad_call(
            attention,
            f"query must have a head_size from 1 to 576; got {size}",
            query=ones(4, 4, size),
            kv_cache=ones(4, 2, 4, size),
        )
        for size in (0, 577)
    ),
    *(
        bad_call(
            attention,
            "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; "
            f"got {[*shape]}{remedy}",
            kv_cache=ones(*shape),
        )
        for shape, remedy in (
            ((4, 4, 8), ""),
            ((4, 0, 4, 8), ""),
            ((4, 2, 0, 8), ""),
            ((4, 2, 3, 8), ". 3 is odd"),
            (
                (4, 2, 4, 16),
                ". It would fit kv_layout='nbh(2d)' or 'nhb(2d)'. query has head_size=8, kv_cache 16",
            ),
            ((4, 2, 3, 2, 8), ". It would fit kv_layout='n2bhd' or 'n2hbd'"),
            ((4, 2, 2, 16), ". It would fit kv_layout='nbh(2d)' or 'nhb(2d)'"),
        )
    ),
    bad_call(
        attention,
        "query must have kv_cache's dtype float16; got float32: cast query, or make another cache",
        kv_cache=ones(4, 2, 4, 8, dtype=F16),
    ),
    bad_call(
        attention,
        "kv_cache must have query's dtype float32, or float8_e4m3fn, float8_e5m2, int8 or uint8; got int32",
        kv_cache=ones(4, 2, 4, 8, dtype=I32),
    ),
    bad_call(
        attention,
        "query's num_heads must be a multiple of num_kv_heads=3; got 4",
        kv_cache=ones(4, 2, 6, 8),
    ),
    bad_call(
        attention,
        "query's num_heads must be a multiple of num_kv_heads=2; got 0",
        query=ones(4, 0, 8),
    ),
    *(
        bad_call(
            attention,
            f"{name} must have shape {rule}; got {[*shape]}",
            **{name: ones(*shape, dtype=dtype)},
        )
        for name, rule, shape, dtype in (
            ("context_lens", "[max_seqs]", (3, 1), I32),
            ("block_tables", "[max_seqs=3, max_blocks_per_seq]", (2, 2), I32),
            ("block_tables", "[max_seqs=3, max_blocks_per_seq]", (3,), I32),
            ("query_start_loc", "[max_seqs + 1=4]", (3,), I32),
            ("num_seqs", "[] or [1]", (2,), I32),
            ("tree_mask", "[num_tokens=4, 2]", (4, 64), I32),
            ("bidirectional_ranges", "[num_tokens=4, 2]", (4,), I32),
            ("causal", "[max_seqs=3]", (4,), I32),
            ("sinks", "[num_heads=4]", (2,), F32),
            ("sinks", "[num_heads=4]", (4, 1), F32),
            ("alibi_slopes", "[num_heads=4]", (2,), F32),
            ("alibi_slopes", "[num_heads=4]", (4, 1), F32),
        )
    ),
    *(
        bad_call(
            attention,
            f"{name} must have dtype {dtypes}; got {np.dtype(dtype)}",
            **{name: ones(*shape, dtype=dtype)},
        )
        for name, dtypes, shape, dtype in (
            ("context_lens", "int32", (3,), F32),
            ("block_tables", "int32", (3, 2), F32),
            ("query_start_loc", "int32", (4,), F32),
            ("num_seqs", "int32", (), F32),
            ("tree_mask", "int32", (4, 2), F32),
            ("bidirectional_ranges", "int32", (4, 2), F32),
            ("causal", "int32 or bool", (3,), F32),
            ("sinks", "float32", (4,), F16),
            ("alibi_slopes", "float32", (4,), F16),
        )
    ),
    *(
        bad_call(attention, f"scale must be {rule}; got {scale}", scale=scale)
        for rule, scales in (
            ("finite in float32", (float("inf"), float("nan"), 1e300)),
            ("at most 2**126 in magnitude", (-1e38, 3e38)),
        )
        for scale in scales
    ),
    *(
        bad_call(
            attention, f"sliding_window must be at least 1, or None; got {x}", sliding_window=x
        )
        for x in (-3, 0)
    ),
    *(
        bad_call(
            attention,
            f"soft_cap must be positive and finite in float32, or None; got {cap}",
            soft_cap=cap,
        )
        for cap in (-1.5, 0.0, float("nan"), float("inf"))
    ),
    bad_call(
        attention,
        "soft_cap must be at least scale / 2**126 in magnitude; got 1e-10",
        scale=-1e30,
        soft_cap=1e-10,
    ),
    *(
        bad_call(attention, rule, **{name: value}, tree_mask=np.zeros((4, 2), I32))
        for rule, name, value in (
            ("alibi_slopes must be None with tree_mask; got shape [4]", "alibi_slopes", ones(4)),
            ("sliding_window must be at least 64 with tree_mask; got 63", "sliding_window", 63),
            ("causal must be True with tree_mask; got False", "causal", False),
            ("causal must be True with tree_mask; got shape [3]", "causal", np.zeros(3, I32)),
            (
                "bidirectional_ranges must be None with tree_mask; got shape [4, 2]",
                "bidirectional_ranges",
                np.zeros((4, 2), I32),
            ),
        )
    ),
    *(
        bad_call(
            op,
            f"{name} must {rule}",
            kv_cache=np.zeros((4, 2, 4, 8), cache_dtype),
            **{name: scales},
        )
        for op, reference_argument in ((attention, "query"), (update, "key"))
        for name in ("k_scale", "v_scale")
        for rule, cache_dtype, scales in (
            (
                f"be None unless kv_cache has fewer bits than {reference_argument}; got shape [2]",
                F32,
                ones(2),
            ),
            (
                "have shape [], [1], [num_kv_heads=2] or [num_blocks=4, block_size=2, num_kv_heads]; got [3]",
                np.int8,
                ones(3),
            ),
            (
                "have shape [], [1], [num_kv_heads=2] or [num_blocks=4, block_size=2, num_kv_heads]; got [2, 2, 2]",
                np.int8,
                ones(2, 2, 2),
            ),
            ("have dtype float32; got float16", np.int8, ones(dtype=F16)),
        )
    ),
    *(
        bad_call(
            op,
            f"{name} must be given with a cache of {dtype}, which holds whole numbers ({name}=1.0, as an array, "
            f"keeps whole numbers{more}); got None",
            kv_cache=np.zeros((4, 2, 4, 8 if dtype == "int8" else 4), dtype),
            **{other: ones() for other in {"k_scale", "v_scale"} - {name}},
        )
        for name in ("k_scale", "v_scale")
        for op, more in (
            (attention, ""),
            (update, f"; {name}_cache gets scales that the call makes"),
        )
        for dtype in ("int8", "uint8")
    ),
    *(
        bad_call(
            op,
            "v_scale must be given with a cache of uint8, which holds whole numbers (v_scale=1.0, as an array, "
            f"keeps whole numbers{more}); got None",
            kv_cache=np.zeros((4, 2, 2, 8), np.int8),
            value_cache=np.zeros((4, 2, 2, 4), np.uint8),
            k_scale=ones(2),
        )
        for op, more in (
            (attention, ""),
            (update, "; v_scale_cache gets scales that the call makes"),
        )
    ),
    *(
        bad_call(update, f"{name} must {rule}", **{name: scales} | others)
        for name in ("k_scale_cache", "v_scale_cache")
        for rule, scales, others in (
            (
                "be None unless kv_cache has fewer bits than key; got shape [4, 2, 2]",
                ones(4, 2, 2),
                {},
            ),
            (
                "have shape [num_blocks=4, block_size=2, num_kv_heads=2]; got [2]",
                ones(2),
                INT8_CACHE,
            ),
            ("have dtype float32; got float16", ones(4, 2, 2, dtype=F16), INT8_CACHE),
        )
    ),
    *(
        bad_call(
            update,
            f"{name} must be None with {name}_cache, which gets the scales that the call makes; "
            "got shape []",
            **{name: ones(), f"{name}_cache": ones(4, 2, 2)} | INT8_CACHE,
        )
        for name in ("k_scale", "v_scale")
    ),
    bad_call(
        update,
        "k_scale must be None unless kv_cache has fewer bits than key; got shape []",
        kv_cache=np.zeros((4, 2, 4, 8), np.int8),
        key=ones(3, 2, 8, dtype=np.int8),
        value=ones(3, 2, 8, dtype=np.int8),
        k_scale=ones(),
    ),
    bad_call(
        attention, "window_right must be at least 0, or None; got -1", causal=False, window_right=-1
    ),
    bad_call(attention, "max_query_len must be at least 1, or None; got -1", max_query_len=-1),
    bad_call(attention, "window_right must be None unless causal is False; got 3", window_right=3),
    *(
        bad_call(
            op,
            "kv_layout must name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or "
            f"'n2bhd' do; got {layout!r}{remedy}",
            kv_layout=layout,
        )
        for op in (attention, update)
        for layout, remedy in (
            ("NHD", ". FlashInfer's NHD is 'n2bhd' here"),
            ("HND", ". FlashInfer's HND is 'n2hbd' here"),
            ("nb(2h)", ", which lacks d"),
            ("nbhd", ", which lacks 2"),
            ("nb(hd)2", ""),
            ("nbh2(d", ""),
            ("n2nbhd", ""),
            ("", ""),
        )
    ),
    bad_call(
        attention,
        "kv_layout must name each of d, h, n, and perhaps b, once, with d last, as 'nbhd' does where V is "
        "value_cache; got 'HND'. FlashInfer's HND is 'nhbd' here",
        kv_layout="HND",
        value_cache=ones(4, 2, 4, 8),
    ),
    bad_call(
        attention,
        "kv_layout must name each of d, h, n, and perhaps b, once, with d last, as 'nbhd' does where V is "
        "value_cache; got 'n2bhd'",
        kv_layout="n2bhd",
        value_cache=ones(4, 2, 4, 8),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, 2, block_size, num_kv_heads, head_size=8]; "
        "got [4, 2, 4, 8]",
        kv_layout="n2bhd",
    ),
    bad_call(
        update,
        "kv_cache must have shape [2, num_blocks, num_kv_heads=2, block_size, head_size=8]; "
        "got [2, 4, 3, 2, 8]",
        kv_layout="2nhbd",
        kv_cache=ones(2, 4, 3, 2, 8),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, num_kv_heads=2, 2 * head_size=16]; "
        "got [4, 2, 4, 8]",
        kv_layout="nbh(2d)",
    ),
    *(
        bad_call(
            attention,
            f"value_head_size must be from 1 to head_size=8; got {size}",
            value_head_size=size,
        )
        for size in (0, -1, 9)
    ),
    *(
        bad_call(
            op,
            f"{name} must be None where V is a part of K; got shape {shape}",
            kv_cache=ones(4, 2, 8, dtype=np.int8),
            **{name: np.ones(shape, np.int8 if name == "value_cache" else F32)},
            **changes,
        )
        for op, changes, own in (
            (attention, {"value_head_size": 8}, ()),
            (
                update,
                {"key": ones(3, 1, 8), "value": ones(3, 1, 0)},
                (("v_scale_cache", [4, 2, 1]),),
            ),
        )
        for name, shape in (("value_cache", [4, 2, 8]), ("v_scale", []), *own)
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, head_size=8]; got [4, 2, 4, 8]",
        value_head_size=8,
    ),
    bad_call(
        attention,
        "kv_layout must name each of d, n, and perhaps b and h, once, with d last, as 'nbd' does "
        "where V is a part of K; got 'n2bd'",
        value_head_size=8,
        kv_layout="n2bd",
    ),
    bad_call(update, "kv_layout must name h with num_kv_heads=2; got 'nbd'", value=ones(3, 2, 0)),
    *(
        bad_call(
            op,
            f"value_cache must have shape {rule}, as kv_cache but for the head size; got "
            f"{[*value_shape]}",
            kv_cache=ones(*shape),
            value_cache=ones(*value_shape),
        )
        for op, shape, rule, value_shape in (
            (attention, (4, 2, 4, 8), "[4, 2, 4, 1 to 8]", (3, 2, 4, 8)),
            (attention, (4, 2, 4, 8), "[4, 2, 4, 1 to 8]", (4, 2, 4, 9)),
            (attention, (4, 2, 4, 8), "[4, 2, 4, 1 to 8]", (4, 2, 4, 0)),
            (update, (4, 2, 2, 8), "[4, 2, 2, 8]", (3, 2, 2, 8)),
            (update, (4, 2, 2, 8), "[4, 2, 2, 8]", (4, 2, 2, 7)),
        )
    ),
    bad_call(
        update,
        "value must have shape [num_tokens=3, num_kv_heads=2, value_head_size]; got [3, 1, 8]",
        kv_cache=ones(4, 2, 2, 8),
        value_cache=ones(4, 2, 2, 8),
        value=ones(3, 1, 8),
    ),
    *(
        bad_call(
            op,
            "value_cache must have kv_cache's dtype float32; got float16",
            kv_cache=ones(*shape),
            value_cache=np.ones(shape, F16),
        )
        for op, shape in ((attention, (4, 2, 4, 8)), (update, (4, 2, 2, 8)))
    ),
    *(
        bad_call(
            op,
            f"value_cache must have kv_cache's dtype {rule}; got {value_dtype}",
            kv_cache=np.ones((4, 2, 2, 8 // numbers_of(key_dtype)), key_dtype),
            value_cache=np.ones((4, 2, 2, 8 // numbers_of(value_dtype)), value_dtype),
        )
        for op in (attention, update)
        for key_dtype, rule, value_dtype in (
            ("int8", "int8, or uint8", "float8_e4m3fn"),
            ("float8_e5m2", "float8_e5m2", "uint8"),
            ("uint8", "uint8, or int8", "float32"),
            ("float32", "float32", "int8"),
        )
    ),
    bad_call(
        update,
        "value_cache must have kv_cache's dtype int8, that of key, which is copied; got uint8",
        kv_cache=np.zeros((4, 2, 2, 8), np.int8),
        value_cache=np.zeros((4, 2, 2, 4), np.uint8),
        key=ones(3, 2, 8, dtype=np.int8),
        value=ones(3, 2, 8, dtype=np.int8),
    ),
    *(
        bad_call(
            op,
            f"kv_cache must have shape [{sizes}, head_size / 2=4]; got [4, 2, 4, 10]. "
            f"{other} has head_size / 2=4, kv_cache 10",
            kv_cache=np.zeros((4, 2, 4, 10), np.uint8),
        )
        for op, sizes, other in (
            (attention, "num_blocks, block_size, 2 * num_kv_heads", "query"),
            (update, "num_blocks, block_size, 2 * num_kv_heads=4", "key"),
        )
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size / 2=4]; "
        "got [4, 2, 3, 2, 4]. It would fit kv_layout='n2bhd' or 'n2hbd'",
        kv_cache=ones(4, 2, 3, 2, 4, dtype=np.uint8),
    ),
    bad_call(
        attention,
        "kv_cache must have an even head size with dtype uint8, which holds pairs (int8 holds any); got 7",
        query=ones(4, 4, 7),
        kv_cache=np.zeros((4, 2, 4, 3), np.uint8),
    ),
    bad_call(
        update,
        "value_cache must have an even head size with dtype uint8, which holds pairs "
        "(int8 holds any); got 7",
        kv_cache=np.zeros((4, 2, 2, 8), np.int8),
        value_cache=np.zeros((4, 2, 2, 3), np.uint8),
        value=ones(3, 2, 7),
    ),
    bad_call(
        attention,
        "value_cache must have shape [4, 2, 2, 1 to 4], as kv_cache but for the head size, of which "
        "an element of uint8 holds two numbers; got [4, 2, 2, 8]",
        kv_cache=np.zeros((4, 2, 2, 8), np.int8),
        value_cache=np.zeros((4, 2, 2, 8), np.uint8),
    ),
    bad_call(
        update,
        "value_cache must have shape [4, 2, 2, 4], as kv_cache but for the head size, of which "
        "an element of uint8 holds two numbers; got [4, 2, 2, 8]",
        kv_cache=np.zeros((4, 2, 2, 4), np.uint8),
        value_cache=np.zeros((4, 2, 2, 8), np.uint8),
    ),
    bad_call(
        update,
        "key must have shape [num_tokens, num_kv_heads, head_size]; got [3, 16]",
        key=ones(3, 16),
    ),
    bad_call(
        update,
        "key must have dtype float32, float16 or bfloat16, or that of a quantized kv_cache; got int32",
        key=ones(3, 2, 8, dtype=I32),
    ),
    bad_call(
        update,
        "value must have shape [num_tokens=3, num_kv_heads=2, head_size=8]; got [3, 1, 8]",
        value=ones(3, 1, 8),
    ),
    bad_call(
        update, "value must have key's dtype float32; got float16", value=ones(3, 2, 8, dtype=F16)
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 2, 2, 8]. "
        "key has num_kv_heads=2, kv_cache 1",
        kv_cache=ones(4, 2, 2, 8),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 0, 4, 8]",
        kv_cache=ones(4, 0, 4, 8),
    ),
    bad_call(
        update,
        "key must have kv_cache's dtype float16; got float32: cast key, or make another cache",
        kv_cache=ones(4, 2, 4, 8, dtype=F16),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; "
        "got [2, 4, 3, 2, 8]. It would fit kv_layout='2nbhd'",
        kv_cache=ones(2, 4, 3, 2, 8),
    ),
    bad_call(
        update,
        "slot_mapping must have shape [num_tokens=3]; got [2]",
        slot_mapping=ones(2, dtype=I32),
    ),
    bad_call(
        update, "slot_mapping must have dtype int32 or int64; got float32", slot_mapping=ones(3)
    ),
    *(
        bad_call(
            update,
            f"{name} must be None without cos_sin_cache; got shape {list(array.shape)}",
            **{name: array},
        )
        for name, array in (("query", ones(3, 4, 8)), ("positions", ones(3, dtype=I32)))
    ),
    bad_call(update, "interleaved must be False without cos_sin_cache; got True", interleaved=True),
    bad_call(
        rotated_update, "positions must be given with cos_sin_cache; got None", positions=None
    ),
    bad_call(
        rotated_update,
        "cos_sin_cache must be None where V is a part of K, of which other numbers are rotated "
        "(rotate before); got shape [8, 4]",
        kv_cache=np.zeros((4, 2, 8), F32),
        key=ones(3, 1, 8),
        value=ones(3, 1, 0),
    ),
    bad_call(
        rotated_update,
        "key must have dtype float32, float16 or bfloat16 with cos_sin_cache; got int8",
        kv_cache=np.zeros((4, 2, 4, 8), np.int8),
        key=ones(3, 2, 8, dtype=np.int8),
        value=ones(3, 2, 8, dtype=np.int8),
    ),
    *(
        bad_call(
            rotated_update,
            "cos_sin_cache must have shape [max_positions, rotary_dim], with an even rotary_dim "
            f"from 2 to 8; got {list(shape)}",
            cos_sin_cache=ones(*shape),
        )
        for shape in ((8,), (8, 0), (8, 3), (8, 10))
    ),
    bad_call(
        rotated_update,
        "cos_sin_cache must have dtype float32, or key's dtype float32; got float16",
        cos_sin_cache=ones(8, 4, dtype=F16),
    ),
    bad_call(
        rotated_update,
        "positions must have shape [num_tokens=3]; got [2]",
        positions=np.zeros(2, I32),
    ),
    bad_call(
        rotated_update,
        "positions must have dtype int32 or int64; got float32",
        positions=np.zeros(3, F32),
    ),
    *(
        bad_call(
            rotated_update,
            "query must have shape [num_tokens=3, a multiple of num_kv_heads=2, head_size=8]; "
            f"got {list(shape)}",
            query=ones(*shape),
        )
        for shape in ((3, 32), (2, 4, 8), (3, 3, 8), (3, 0, 8), (3, 4, 16))
    ),
    bad_call(
        rotated_update,
        "query must have key's dtype float32; got float16",
        query=ones(3, 4, 8, dtype=F16),
    ),
    bad_call(add, "a must have dtype float32; got int32", a=ones(2, 3, dtype=I32)),
    bad_call(add, "b must have shape [2, 3]; got [3]", b=ones(3)),
    bad_call(add, "b must have dtype float32; got int32", b=ones(2, 3, dtype=I32)),
    *(
        bad_call(training, message, **{name: value})
        for name, value, message in (
            (
                "query",
                ones(4, 8),
                "query must have shape [num_tokens, num_heads, head_size]; got [4, 8]",
            ),
            (
                "query",
                ones(4, 3, 8),
                "query's num_heads must be a multiple of num_kv_heads=2; got 3",
            ),
            (
                "key",
                ones(3, 2, 8),
                "key must have shape [num_tokens=4, num_kv_heads, head_size=8]; got [3, 2, 8]",
            ),
            ("key", ones(4, 0, 8), "key must have num_kv_heads of at least 1; got 0"),
            (
                "value",
                ones(4, 2, 0),
                "value must have shape [num_tokens=4, num_kv_heads=2, 1 to 8]; got [4, 2, 0]",
            ),
            (
                "value",
                ones(4, 2, 9),
                "value must have shape [num_tokens=4, num_kv_heads=2, 1 to 8]; got [4, 2, 9]",
            ),
            (
                "value",
                ones(4, 1, 8),
                "value must have shape [num_tokens=4, num_kv_heads=2, 1 to 8]; got [4, 1, 8]",
            ),
            (
                "key",
                ones(4, 2, 8, dtype=F16),
                "key must have query's dtype float32; got float16",
            ),
            ("query_start_loc", ones(dtype=I32), "query_start_loc must have shape [max_seqs + 1]"),
            (
                "query_start_loc",
                ones(4),
                "query_start_loc must have dtype int32; got float32",
            ),
            ("num_seqs", ones(2, dtype=I32), "num_seqs must have shape [] or [1]; got [2]"),
            ("scale", np.nan, "scale must be finite in float32; got nan"),
            ("sliding_window", 0, "sliding_window must be at least 1, or None; got 0"),
            ("window_right", 3, "window_right must be None unless causal is False; got 3"),
            ("max_query_len", 0, "max_query_len must be at least 1, or None; got 0"),
            ("sinks", ones(3), "sinks must have shape [num_heads=4]; got [3]"),
            (
                "bidirectional_ranges",
                ones(4, 3, dtype=I32),
                "bidirectional_ranges must have shape [num_tokens=4, 2]; got [4, 3]",
            ),
            ("causal", ones(4, dtype=I32), "causal must have shape [max_seqs=3]; got [4]"),
        )
    ),
]

# Wrong values: found by the handler on the CPU.
DYNAMIC = [
    bad_call(attention, "num_seqs must be from 0 to max_seqs=3; got 4", num_seqs=np.array(4, I32)),
    bad_call(
        attention, "num_seqs must be from 0 to max_seqs=3; got -1", num_seqs=np.array([-1], I32)
    ),
    bad_call(
        attention,
        "num_seqs must be from 0 to max_seqs=3; got 5",
        causal=False,
        num_seqs=np.array(5, I32),
    ),
    bad_call(
        attention,
        "query_start_loc[0] must be at least 0; got -1",
        query_start_loc=np.array([-1, 2, 3, 0], I32),
    ),
    bad_call(
        attention,
        "query_start_loc must not decrease; got query_start_loc[2]=1 after query_start_loc[1]=2",
        query_start_loc=np.array([0, 2, 1, 0], I32),
    ),
    bad_call(
        attention,
        "query_start_loc must give sequence 0 at most max_query_len=1 tokens; got 2",
        max_query_len=1,
    ),
    bad_call(
        attention,
        "query_start_loc[2] must be at most num_tokens=4; got 5",
        query_start_loc=np.array([0, 2, 5, 0], I32),
        context_lens=np.array([3, 3, 0], I32),
    ),
    bad_call(
        attention,
        "query_start_loc[2] must be at most num_tokens=4; got 5",
        query_start_loc=np.array([0, 4, 5, 0], I32),  # all tokens have a sequence
        context_lens=np.array([4, 1, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[0] must be from 0 to max_blocks_per_seq=2 * block_size=2; got 5. Give block_tables more "
        "columns; or, if kv_cache has blocks of another size, name its dimensions in kv_layout",
        context_lens=np.array([5, 1, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[1] must be from 0 to max_blocks_per_seq=2 * block_size=2; got -2",
        context_lens=np.array([3, -2, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[0] must count the sequence's 2 query tokens too; got 1",
        context_lens=np.array([1, 1, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[1] must count the sequence's 1 query tokens too; got 0",
        context_lens=np.array([1, 0, 0], I32),
        causal=np.array([0, 1, 1], I32),
    ),
    bad_call(
        attention,
        "context_lens[0] must be from 0 to max_blocks_per_seq=2 * block_size=2; got -1",
        causal=False,
        context_lens=np.array([-1, 1, 0], I32),
    ),
    bad_call(
        attention,
        "block_tables[0, 1] must be from 0 to num_blocks - 1=3; got 4",
        block_tables=np.array([[3, 4], [0, 9], [9, 9]], I32),
    ),
    bad_call(
        attention,
        "block_tables[1, 0] must be from 0 to num_blocks - 1=3; got -1",
        block_tables=np.array([[3, 1], [-1, 9], [9, 9]], I32),
    ),
    bad_call(
        attention,
        "block_tables[0, 0] must be from 0 to num_blocks - 1=-1; got 3",
        kv_cache=ones(0, 2, 4, 8),
    ),
    bad_call(
        attention,
        "block_tables[0, 0] must be from 0 to num_blocks - 1=3; got 9",
        sliding_window=1,
        context_lens=np.array([4, 1, 0], I32),
        block_tables=np.array([[9, 1], [0, 9], [9, 9]], I32),
        bidirectional_ranges=np.array([[0, 0], [0, 2], [-5, -1], [0, 0]], I32),
    ),
    bad_call(
        attention,
        "tree_mask[1] must have bits of the sequence's 2 query tokens only; got [4, 0]",
        tree_mask=np.array([[1, 0], [4, 0], [0, 0], [-1, -1]], I32),
    ),
    bad_call(
        attention,
        "tree_mask[2] must have bits of the sequence's 1 query tokens only; got [1, -2147483648]",
        tree_mask=np.array([[1, 0], [3, 0], [1, -(2**31)], [-1, -1]], I32),
    ),
    bad_call(
        attention,
        "tree_mask[64] must have no bits, as the sequence has more than 64 query tokens; got [1, 0]",
        query=ones(66, 4, 8),
        kv_cache=ones(40, 2, 4, 8),
        block_tables=np.arange(120, dtype=I32).reshape(3, 40) % 40,
        context_lens=np.array([66, 0, 0], I32),
        query_start_loc=np.array([0, 66, 66, 66], I32),
        tree_mask=np.eye(66, 2, -64, I32),
    ),
    bad_call(
        update,
        "slot_mapping[1] must be below num_blocks * block_size=8 (negative for padding); got 8",
        slot_mapping=np.array([0, 8, -1], I32),
    ),
    *(
        bad_call(
            rotated_update,
            "positions[1] must be from 0 to max_positions - 1=7, as the token has a slot; "
            f"got {position}",
            positions=np.array([0, position, 8], I32),
        )
        for position in (8, -1)
    ),
]
