"""Calls that break one rule of the contract each, and the errors that they must raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shared_ffi.spec import numbers_of
from tests.support.sound_calls import add, attention, op_of, rotated_update, update

F32, F16, I32 = np.float32, np.float16, np.int32
INT8_CACHE = {"kv_cache": np.zeros((4, 2, 4, 8), np.int8)}


@dataclass(frozen=True)
class BadCall:
    op: str
    arguments: dict[str, Any]
    error: type[Exception]
    message: str
    id: str = ""


def bad_call(
    make: Callable[..., dict[str, Any]],
    message: str,
    error: type[Exception] = ValueError,
    **changes: Any,
) -> Any:
    arguments = make(**changes)
    op = op_of(arguments)
    name = "-".join([op, *(f"{k}={_short(v)}" for k, v in changes.items())])
    return pytest.param(BadCall(op, arguments, error, f"{op}: {message}"), id=name)


def _short(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


# Wrong shapes, dtypes and attributes: found before the call.
STATIC = [
    bad_call(
        attention,
        "query must have shape [num_tokens, num_heads, head_size]; got [4, 8]",
        query=np.ones((4, 8), F32),
    ),
    bad_call(
        attention,
        "query must have dtype float32, float16 or bfloat16; got int32",
        TypeError,
        query=np.ones((4, 4, 8), I32),
    ),
    bad_call(
        attention,
        "query must have a head_size from 1 to 576; got 0",
        query=np.ones((4, 4, 0), F32),
        kv_cache=np.ones((4, 2, 4, 0), F32),
    ),
    bad_call(
        attention,
        "query must have a head_size from 1 to 576; got 577",
        query=np.ones((4, 4, 577), F32),
        kv_cache=np.ones((4, 2, 4, 577), F32),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 4, 8]",
        kv_cache=np.ones((4, 4, 8), F32),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 2, 4, 16]. "
        "It would fit kv_layout='nbh(2d)' or 'nhb(2d)'. query has head_size=8, kv_cache 16",
        kv_cache=np.ones((4, 2, 4, 16), F32),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 0, 4, 8]",
        kv_cache=np.ones((4, 0, 4, 8), F32),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 2, 0, 8]",
        kv_cache=np.ones((4, 2, 0, 8), F32),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; got [4, 2, 3, 8]. 3 is odd",
        kv_cache=np.ones((4, 2, 3, 8), F32),
    ),
    bad_call(
        attention,
        "query must have kv_cache's dtype float16; got float32: cast query, or make another cache",
        TypeError,
        kv_cache=np.ones((4, 2, 4, 8), F16),
    ),
    bad_call(
        attention,
        "kv_cache must have query's dtype float32, or float8_e4m3fn, float8_e5m2, int8 or uint8; got int32",
        TypeError,
        kv_cache=np.ones((4, 2, 4, 8), I32),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; "
        "got [4, 2, 3, 2, 8]. It would fit kv_layout='n2bhd' or 'n2hbd'",
        kv_cache=np.ones((4, 2, 3, 2, 8), F32),
    ),
    bad_call(
        attention,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads, head_size=8]; "
        "got [4, 2, 2, 16]. It would fit kv_layout='nbh(2d)' or 'nhb(2d)'",
        kv_cache=np.ones((4, 2, 2, 16), F32),
    ),
    bad_call(
        attention,
        "query's num_heads must be a multiple of num_kv_heads=3; got 4",
        kv_cache=np.ones((4, 2, 6, 8), F32),
    ),
    bad_call(
        attention,
        "query's num_heads must be a multiple of num_kv_heads=2; got 0",
        query=np.ones((4, 0, 8), F32),
    ),
    bad_call(
        attention,
        "context_lens must have shape [max_seqs]; got [3, 1]",
        context_lens=np.ones((3, 1), I32),
    ),
    bad_call(
        attention,
        "block_tables must have shape [max_seqs=3, max_blocks_per_seq]; got [2, 2]",
        block_tables=np.ones((2, 2), I32),
    ),
    bad_call(
        attention,
        "block_tables must have shape [max_seqs=3, max_blocks_per_seq]; got [3]",
        block_tables=np.ones(3, I32),
    ),
    bad_call(
        attention,
        "query_start_loc must have shape [max_seqs + 1=4]; got [3]",
        query_start_loc=np.ones(3, I32),
    ),
    bad_call(attention, "num_seqs must have shape [] or [1]; got [2]", num_seqs=np.ones(2, I32)),
    bad_call(
        attention,
        "context_lens must have dtype int32; got float32",
        TypeError,
        context_lens=np.ones(3, F32),
    ),
    bad_call(
        attention,
        "block_tables must have dtype int32; got float32",
        TypeError,
        block_tables=np.ones((3, 2), F32),
    ),
    bad_call(
        attention,
        "query_start_loc must have dtype int32; got float32",
        TypeError,
        query_start_loc=np.ones(4, F32),
    ),
    bad_call(
        attention,
        "num_seqs must have dtype int32; got float32",
        TypeError,
        num_seqs=np.array(2, F32),
    ),
    bad_call(attention, "scale must be finite in float32; got inf", scale=float("inf")),
    bad_call(attention, "scale must be finite in float32; got nan", scale=float("nan")),
    bad_call(attention, "scale must be finite in float32; got 1e+300", scale=1e300),
    bad_call(attention, "scale must be at most 2**126 in magnitude; got -1e+38", scale=-1e38),
    bad_call(attention, "scale must be at most 2**126 in magnitude; got 3e+38", scale=3e38),
    bad_call(attention, "sliding_window must be at least 1, or None; got -3", sliding_window=-3),
    bad_call(attention, "sliding_window must be at least 1, or None; got 0", sliding_window=0),
    bad_call(
        attention,
        "soft_cap must be positive and finite in float32, or None; got -1.5",
        soft_cap=-1.5,
    ),
    bad_call(
        attention,
        "soft_cap must be positive and finite in float32, or None; got 0.0",
        soft_cap=0.0,
    ),
    bad_call(
        attention,
        "soft_cap must be positive and finite in float32, or None; got nan",
        soft_cap=float("nan"),
    ),
    bad_call(
        attention,
        "soft_cap must be positive and finite in float32, or None; got inf",
        soft_cap=float("inf"),
    ),
    bad_call(
        attention,
        "soft_cap must be at least scale / 2**126 in magnitude; got 1e-10",
        scale=-1e30,
        soft_cap=1e-10,
    ),
    *(
        bad_call(attention, f"{name} must have {rule}", error, **{name: array})
        for name in ("sinks", "alibi_slopes")
        for rule, error, array in (
            ("shape [num_heads=4]; got [2]", ValueError, np.ones(2, F32)),
            ("shape [num_heads=4]; got [4, 1]", ValueError, np.ones((4, 1), F32)),
            ("dtype float32; got float16", TypeError, np.ones(4, F16)),
        )
    ),
    bad_call(
        attention,
        "tree_mask must have shape [num_tokens=4, 2]; got [4, 64]",
        tree_mask=np.zeros((4, 64), I32),
    ),
    bad_call(
        attention,
        "tree_mask must have dtype int32; got float32",
        TypeError,
        tree_mask=np.zeros((4, 2), F32),
    ),
    bad_call(
        attention,
        "alibi_slopes must be None with tree_mask; got shape [4]",
        alibi_slopes=np.ones(4, F32),
        tree_mask=np.zeros((4, 2), I32),
    ),
    bad_call(
        attention,
        "sliding_window must be at least 64 with tree_mask; got 63",
        sliding_window=63,
        tree_mask=np.zeros((4, 2), I32),
    ),
    bad_call(
        attention,
        "causal must be True with tree_mask; got False",
        causal=False,
        tree_mask=np.zeros((4, 2), I32),
    ),
    bad_call(
        attention,
        "bidirectional_ranges must have shape [num_tokens=4, 2]; got [4]",
        bidirectional_ranges=np.zeros(4, I32),
    ),
    bad_call(
        attention,
        "bidirectional_ranges must have dtype int32; got float32",
        TypeError,
        bidirectional_ranges=np.zeros((4, 2), F32),
    ),
    bad_call(
        attention,
        "bidirectional_ranges must be None with tree_mask; got shape [4, 2]",
        bidirectional_ranges=np.zeros((4, 2), I32),
        tree_mask=np.zeros((4, 2), I32),
    ),
    bad_call(
        attention,
        "causal must be True with tree_mask; got shape [3]",
        causal=np.zeros(3, I32),
        tree_mask=np.zeros((4, 2), I32),
    ),
    bad_call(attention, "causal must have shape [max_seqs=3]; got [4]", causal=np.zeros(4, I32)),
    bad_call(
        attention,
        "causal must have dtype int32 or bool; got float32",
        TypeError,
        causal=np.zeros(3, F32),
    ),
    *(
        bad_call(
            op,
            f"{name} must {rule}",
            error,
            kv_cache=np.zeros((4, 2, 4, 8), cache_dtype),
            **{name: scales},
        )
        for op, reference_argument in ((attention, "query"), (update, "key"))
        for name in ("k_scale", "v_scale")
        for rule, error, cache_dtype, scales in (
            (
                f"be None unless kv_cache has fewer bits than {reference_argument}; got shape [2]",
                ValueError,
                F32,
                np.ones(2, F32),
            ),
            (
                "have shape [], [1], [num_kv_heads=2] or [num_blocks=4, block_size=2, num_kv_heads]; got [3]",
                ValueError,
                np.int8,
                np.ones(3, F32),
            ),
            (
                "have shape [], [1], [num_kv_heads=2] or [num_blocks=4, block_size=2, num_kv_heads]; got [2, 2, 2]",
                ValueError,
                np.int8,
                np.ones((2, 2, 2), F32),
            ),
            ("have dtype float32; got float16", TypeError, np.int8, np.ones((), F16)),
        )
    ),
    *(
        bad_call(
            op,
            f"{name} must be given with a cache of {dtype}, which holds whole numbers ({name}=1.0, as an array, "
            f"keeps whole numbers{more}); got None",
            kv_cache=np.zeros((4, 2, 4, 8 if dtype == "int8" else 4), dtype),
            **{other: np.ones((), F32) for other in {"k_scale", "v_scale"} - {name}},
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
            k_scale=np.ones(2, F32),
        )
        for op, more in (
            (attention, ""),
            (update, "; v_scale_cache gets scales that the call makes"),
        )
    ),
    *(
        bad_call(update, f"{name} must {rule}", error, **{name: scales} | others)
        for name in ("k_scale_cache", "v_scale_cache")
        for rule, error, scales, others in (
            (
                "be None unless kv_cache has fewer bits than key; got shape [4, 2, 2]",
                ValueError,
                np.ones((4, 2, 2), F32),
                {},
            ),
            (
                "have shape [num_blocks=4, block_size=2, num_kv_heads=2]; got [2]",
                ValueError,
                np.ones(2, F32),
                INT8_CACHE,
            ),
            (
                "have dtype float32; got float16",
                TypeError,
                np.ones((4, 2, 2), F16),
                INT8_CACHE,
            ),
        )
    ),
    *(
        bad_call(
            update,
            f"{name} must be None with {name}_cache, which gets the scales that the call makes; "
            "got shape []",
            **{name: np.ones((), F32), f"{name}_cache": np.ones((4, 2, 2), F32)} | INT8_CACHE,
        )
        for name in ("k_scale", "v_scale")
    ),
    bad_call(
        update,
        "k_scale must be None unless kv_cache has fewer bits than key; got shape []",
        kv_cache=np.zeros((4, 2, 4, 8), np.int8),
        key=np.ones((3, 2, 8), np.int8),
        value=np.ones((3, 2, 8), np.int8),
        k_scale=np.ones((), F32),
    ),
    bad_call(
        attention, "window_right must be at least 0, or None; got -1", causal=False, window_right=-1
    ),
    bad_call(attention, "max_query_len must be at least 1, or None; got -1", max_query_len=-1),
    bad_call(
        attention,
        "window_right must be None unless causal is False; got 3",
        window_right=3,
    ),
    *(
        bad_call(op, f"kv_layout must {rule} do; got {got}", kv_layout=layout)
        for op in (attention, update)
        for rule in (
            "name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd'",
        )
        for layout, got in (
            ("NHD", "'NHD'. FlashInfer's NHD is 'n2bhd' here"),
            ("HND", "'HND'. FlashInfer's HND is 'n2hbd' here"),
            ("nb(2h)", "'nb(2h)', which lacks d"),
            ("nbhd", "'nbhd', which lacks 2"),
        )
    ),
    bad_call(
        attention,
        "kv_layout must name each of d, h, n, and perhaps b, once, with d last, as 'nbhd' does where V is "
        "value_cache; got 'HND'. FlashInfer's HND is 'nhbd' here",
        kv_layout="HND",
        value_cache=np.ones((4, 2, 4, 8), F32),
    ),
    *(
        bad_call(op, f"kv_layout must {rule}; got {layout!r}", kv_layout=layout)
        for op in (attention, update)
        for rule, layout in (
            (
                "name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd' do",
                "nbhd",
            ),
            (
                "name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd' do",
                "nb(hd)2",
            ),
            (
                "name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd' do",
                "nbh2(d",
            ),
            (
                "name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd' do",
                "n2nbhd",
            ),
            (
                "name each of 2, d, h, n, and perhaps b, once, with d last, as 'nb(h2)d' or 'n2bhd' do",
                "",
            ),
        )
    ),
    bad_call(
        attention,
        "kv_layout must name each of d, h, n, and perhaps b, once, with d last, as 'nbhd' does where V is "
        "value_cache; got 'n2bhd'",
        kv_layout="n2bhd",
        value_cache=np.ones((4, 2, 4, 8), F32),
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
        kv_cache=np.ones((2, 4, 3, 2, 8), F32),
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
            kv_cache=np.ones((4, 2, 8), np.int8),
            **{name: np.ones(shape, np.int8 if name == "value_cache" else F32)},
            **changes,
        )
        for op, changes, own in (
            (attention, {"value_head_size": 8}, ()),
            (
                update,
                {"key": np.ones((3, 1, 8), F32), "value": np.ones((3, 1, 0), F32)},
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
    bad_call(
        update,
        "kv_layout must name h with num_kv_heads=2; got 'nbd'",
        value=np.ones((3, 2, 0), F32),
    ),
    *(
        bad_call(
            op,
            f"value_cache must have shape {rule}, as kv_cache but for the head size; got "
            f"{[*value_shape]}",
            kv_cache=np.ones(shape, F32),
            value_cache=np.ones(value_shape, F32),
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
        kv_cache=np.ones((4, 2, 2, 8), F32),
        value_cache=np.ones((4, 2, 2, 8), F32),
        value=np.ones((3, 1, 8), F32),
    ),
    *(
        bad_call(
            op,
            "value_cache must have kv_cache's dtype float32; got float16",
            TypeError,
            kv_cache=np.ones(shape, F32),
            value_cache=np.ones(shape, F16),
        )
        for op, shape in ((attention, (4, 2, 4, 8)), (update, (4, 2, 2, 8)))
    ),
    *(
        bad_call(
            op,
            f"value_cache must have kv_cache's dtype {rule}; got {value_dtype}",
            TypeError,
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
        TypeError,
        kv_cache=np.zeros((4, 2, 2, 8), np.int8),
        value_cache=np.zeros((4, 2, 2, 4), np.uint8),
        key=np.ones((3, 2, 8), np.int8),
        value=np.ones((3, 2, 8), np.int8),
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
        kv_cache=np.ones((4, 2, 3, 2, 4), np.uint8),
    ),
    bad_call(
        attention,
        "kv_cache must have an even head size with dtype uint8, which holds pairs (int8 holds any); got 7",
        query=np.ones((4, 4, 7), F32),
        kv_cache=np.zeros((4, 2, 4, 3), np.uint8),
    ),
    bad_call(
        update,
        "value_cache must have an even head size with dtype uint8, which holds pairs "
        "(int8 holds any); got 7",
        kv_cache=np.zeros((4, 2, 2, 8), np.int8),
        value_cache=np.zeros((4, 2, 2, 3), np.uint8),
        value=np.ones((3, 2, 7), F32),
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
        key=np.ones((3, 16), F32),
    ),
    bad_call(
        update,
        "key must have dtype float32, float16 or bfloat16, or that of a quantized kv_cache; got int32",
        TypeError,
        key=np.ones((3, 2, 8), I32),
    ),
    bad_call(
        update,
        "value must have shape [num_tokens=3, num_kv_heads=2, head_size=8]; got [3, 1, 8]",
        value=np.ones((3, 1, 8), F32),
    ),
    bad_call(
        update,
        "value must have key's dtype float32; got float16",
        TypeError,
        value=np.ones((3, 2, 8), F16),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 2, 2, 8]. "
        "key has num_kv_heads=2, kv_cache 1",
        kv_cache=np.ones((4, 2, 2, 8), F32),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 0, 4, 8]",
        kv_cache=np.ones((4, 0, 4, 8), F32),
    ),
    bad_call(
        update,
        "key must have kv_cache's dtype float16; got float32: cast key, or make another cache",
        TypeError,
        kv_cache=np.ones((4, 2, 4, 8), F16),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; "
        "got [2, 4, 3, 2, 8]. It would fit kv_layout='2nbhd'",
        kv_cache=np.ones((2, 4, 3, 2, 8), F32),
    ),
    bad_call(
        update, "slot_mapping must have shape [num_tokens=3]; got [2]", slot_mapping=np.ones(2, I32)
    ),
    bad_call(
        update,
        "slot_mapping must have dtype int32 or int64; got float32",
        TypeError,
        slot_mapping=np.ones(3, F32),
    ),
    *(
        bad_call(
            update,
            f"{name} must be None without cos_sin_cache; got shape {list(array.shape)}",
            **{name: array},
        )
        for name, array in (("query", np.ones((3, 4, 8), F32)), ("positions", np.ones(3, I32)))
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
        key=np.ones((3, 1, 8), F32),
        value=np.ones((3, 1, 0), F32),
    ),
    bad_call(
        rotated_update,
        "key must have dtype float32, float16 or bfloat16 with cos_sin_cache; got int8",
        TypeError,
        kv_cache=np.zeros((4, 2, 4, 8), np.int8),
        key=np.ones((3, 2, 8), np.int8),
        value=np.ones((3, 2, 8), np.int8),
    ),
    *(
        bad_call(
            rotated_update,
            "cos_sin_cache must have shape [max_positions, rotary_dim], with an even rotary_dim "
            f"from 2 to 8; got {list(shape)}",
            cos_sin_cache=np.ones(shape, F32),
        )
        for shape in ((8,), (8, 0), (8, 3), (8, 10))
    ),
    bad_call(
        rotated_update,
        "cos_sin_cache must have dtype float32, or key's dtype float32; got float16",
        TypeError,
        cos_sin_cache=np.ones((8, 4), F16),
    ),
    bad_call(
        rotated_update,
        "positions must have shape [num_tokens=3]; got [2]",
        positions=np.zeros(2, I32),
    ),
    bad_call(
        rotated_update,
        "positions must have dtype int32 or int64; got float32",
        TypeError,
        positions=np.zeros(3, F32),
    ),
    *(
        bad_call(
            rotated_update,
            "query must have shape [num_tokens=3, a multiple of num_kv_heads=2, head_size=8]; "
            f"got {list(shape)}",
            query=np.ones(shape, F32),
        )
        for shape in ((3, 32), (2, 4, 8), (3, 3, 8), (3, 0, 8), (3, 4, 16))
    ),
    bad_call(
        rotated_update,
        "query must have key's dtype float32; got float16",
        TypeError,
        query=np.ones((3, 4, 8), F16),
    ),
    bad_call(add, "a must have dtype float32; got int32", TypeError, a=np.ones((2, 3), I32)),
    bad_call(add, "b must have shape [2, 3]; got [3]", b=np.ones(3, F32)),
    bad_call(add, "b must have dtype float32; got int32", TypeError, b=np.ones((2, 3), I32)),
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
        kv_cache=np.ones((0, 2, 4, 8), F32),
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
        query=np.ones((66, 4, 8), F32),
        kv_cache=np.ones((40, 2, 4, 8), F32),
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
