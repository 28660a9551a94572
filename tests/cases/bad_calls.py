"""Calls that break one rule of the contract each, and the errors that they must raise."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shared_ffi.paged_attention import METADATA
from shared_ffi.spec import numbers_of
from tests.cases.sound_calls import add, attention, op_of, rotated_update, training, update

F32, F16, I32 = np.float32, np.float16, np.int32
EPS = {"norm_eps": 1e-6}
INT8_CACHE = {"kv_cache": np.zeros((4, 2, 4, 8), np.int8)}


def assert_says(message: str, wanted: str) -> None:
    """It has these words, and a remedy behind the value."""
    assert wanted in message
    assert ". " in message.partition("; got ")[2].partition("\n")[0], "no remedy"


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
        "query must have shape [num_tokens, num_heads, head_size]; got [4, 8]. Give tokens, heads and the numbers of a "
        "head a dimension each",
        query=ones(4, 8),
    ),
    bad_call(
        attention,
        "query must have shape [num_tokens, num_heads, head_size]; got [2, 2, 4, 8]. Pack the tokens of all sequences into "
        "one dimension",
        query=ones(2, 2, 4, 8),
    ),
    bad_call(
        attention,
        "query must have dtype float32, float16 or bfloat16; got int32. Cast query to one of them",
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
            ((8, 32), ". Give each of these a dimension of its own"),
            ((3, 4, 2, 4, 8), ". If its first dimension counts layers, give the cache of one"),
            ((4, 4, 8), ". If V is a part of K, give value_head_size"),
            ((4, 0, 4, 8), ""),
            ((4, 2, 0, 8), ""),
            ((4, 2, 3, 8), ". 3 is odd. If it holds K alone, give V's cache as value_cache"),
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
        "query must have kv_cache's dtype float16; got float32. Cast query to float16",
        kv_cache=ones(4, 2, 4, 8, dtype=F16),
    ),
    bad_call(
        attention,
        "kv_cache must have query's dtype float32, or float8_e4m3fn, float8_e5m2, int8, uint8, float4_e2m1fn or "
        "float4_e2m1fn_x2; got int32. Make kv_cache with that dtype",
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
            f"{name} must have shape {rule}; got {[*shape]}{remedy}",
            **{name: ones(*shape, dtype=dtype)},
        )
        for name, rule, shape, dtype, remedy in (
            (
                "context_lens",
                "[max_seqs]",
                (3, 1),
                I32,
                ". The lengths of all sequences are one array",
            ),
            (
                "block_tables",
                "[max_seqs=3, max_blocks_per_seq]",
                (2, 2),
                I32,
                ". It has a row for each entry of context_lens",
            ),
            (
                "block_tables",
                "[max_seqs=3, max_blocks_per_seq]",
                (3,),
                I32,
                ". It has a row for each entry of context_lens",
            ),
            (
                "query_start_loc",
                "[max_seqs + 1=4]",
                (3,),
                I32,
                ". It has the first token of each entry of context_lens, then the end",
            ),
            ("num_seqs", "[] or [1]", (2,), I32, ". It is one number"),
            (
                "tree_mask",
                "[num_tokens=4, 2]",
                (4, 64),
                I32,
                ". It has two words of 32 bits for each token of query",
            ),
            (
                "bidirectional_ranges",
                "[num_tokens=4, 2]",
                (4,),
                I32,
                ". It has two positions for each token of query",
            ),
            ("causal", "[max_seqs=3]", (4,), I32, ""),
            (
                "causal",
                "[max_seqs=3]",
                (),
                I32,
                ". For all sequences pass a bool, which jax.jit takes by static_argnames",
            ),
            ("sinks", "[num_heads=4]", (2,), F32, ". It has a number for each query head"),
            ("sinks", "[num_heads=4]", (4, 1), F32, ". It has a number for each query head"),
            ("alibi_slopes", "[num_heads=4]", (2,), F32, ". It has a number for each query head"),
            ("alibi_slopes", "[num_heads=4]", (4, 1), F32, ". It has a number for each query head"),
        )
    ),
    *(
        bad_call(
            attention,
            f"{name} must have dtype {dtypes}; got {np.dtype(dtype)}. {remedy}",
            **{name: ones(*shape, dtype=dtype)},
        )
        for name, dtypes, shape, dtype, remedy in (
            ("context_lens", "int32", (3,), F32, "Cast context_lens to int32"),
            ("block_tables", "int32", (3, 2), F32, "Cast block_tables to int32"),
            ("query_start_loc", "int32", (4,), F32, "Cast query_start_loc to int32"),
            ("num_seqs", "int32", (), F32, "It may be scale, if an array before it was left out"),
            ("tree_mask", "int32", (4, 2), F32, "Cast tree_mask to int32"),
            ("bidirectional_ranges", "int32", (4, 2), F32, "Cast bidirectional_ranges to int32"),
            ("causal", "int32 or bool", (3,), F32, "Cast causal to one of them"),
            ("sinks", "float32", (4,), F16, "Cast sinks to float32"),
            ("alibi_slopes", "float32", (4,), F16, "Cast alibi_slopes to float32"),
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
            (f"have dtype float32; got float16. Cast {name} to float32", np.int8, ones(dtype=F16)),
        )
    ),
    *(
        bad_call(op, message.format(name=name, of=name[0]), **INT8_CACHE | {name: scales} | others)
        for op in (attention, update)
        for name in ("k_scale", "v_scale")
        for message, scales, others in (
            (
                "{name} must have shape [num_blocks=4, block_size=2, num_kv_heads=2, groups=2]; got [4, 2, 1, 2]. It "
                "has scales of groups for each position and kv head",
                ones(4, 2, 1, 2),
                {},
            ),
            (
                "{name} must have dtype float32 or float16 or bfloat16 or float8_e4m3fn or float8_e8m0fnu; got "
                "float8_e5m2. Cast {name} to one of them",
                ones(4, 2, 2, 2, dtype=ml_dtypes.float8_e5m2),
                {},
            ),
            (
                "{name} must have a number of groups that divides the 8 numbers of a row; got 3. All groups of a row "
                "have one size",
                ones(4, 2, 2, 3),
                {},
            ),
            (
                "{name} must have a number of groups that divides the 4 pairs of numbers of a row; got 8. All groups "
                "of a row have one size",
                ones(4, 2, 2, 8),
                {"kv_cache": np.zeros((4, 2, 4, 4), np.uint8)},
            ),
            (
                "{name} must have a number of groups that divides the 8 numbers of a row; got 0. All groups of a row "
                "have one size",
                ones(4, 2, 2, 0),
                {},
            ),
        )
    ),
    *(
        bad_call(
            op, message, **INT8_CACHE | {"k_scale": ones(4, 2, 2, 2), "v_scale": ones()} | others
        )
        for op in (attention, update)
        for message, others in (
            (
                "k_global must have shape [] or [1]; got [2]. It is one number",
                {"k_global": ones(2)},
            ),
            (
                "k_global must have dtype float32; got float16. Cast k_global to float32",
                {"k_global": ones(dtype=F16)},
            ),
            (
                "v_global must be None unless v_scale has groups, [..., num_kv_heads, groups]; got shape []. Leave "
                "v_global out",
                {"v_global": ones()},
            ),
            (
                "codes must be None unless K or V has dtype uint8; got e2m1. Leave codes out",
                {"codes": "e2m1"},
            ),
            (
                "codes must be 'e2m1' or None; got nf4. None stands for whole numbers from -8 to 7",
                {"codes": "nf4", "kv_cache": np.zeros((4, 2, 4, 4), np.uint8)},
            ),
        )
    ),
    bad_call(
        update,
        "round_scales_up must be False unless the call makes scales of float8_e8m0fnu; got True. Leave "
        "round_scales_up out",
        **INT8_CACHE,
        k_scale=ones(),
        v_scale=ones(),
        round_scales_up=True,
    ),
    *(
        bad_call(
            op,
            f"{name} must be given with a cache of {dtype}, which holds whole numbers; got None. {name}=1.0 keeps "
            f"whole numbers{more}",
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
            "v_scale must be given with a cache of uint8, which holds whole numbers; got None. v_scale=1.0 keeps "
            f"whole numbers{more}",
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
                "have shape [num_blocks=4, block_size=2, num_kv_heads=2]; got [2]. It has a scale for each position "
                "and kv head",
                ones(2),
                INT8_CACHE,
            ),
            (
                f"have dtype float32; got float16. Make {name} with that dtype",
                ones(4, 2, 2, dtype=F16),
                INT8_CACHE,
            ),
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
            ("nb(2h)", ". It lacks d"),
            ("nbhd", ". It lacks 2"),
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
        "kv_cache must have shape [num_blocks, block_size, head_size=8]; got [4, 2, 4, 8]. value_head_size is given, "
        "which says that V is a part of K: not where the cache holds both",
        value_head_size=8,
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, head_size=8]; got [4, 2, 2, 8]. value has no columns, which "
        "says that V is a part of K: not where the cache holds both",
        kv_cache=ones(4, 2, 2, 8),
        key=ones(3, 1, 8),
        value=ones(3, 1, 0),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=2, head_size=8]; got [4, 2, 8]. If V is a "
        "part of K, give key[..., :0] as value",
        kv_cache=ones(4, 2, 8),
        key=ones(3, 1, 8),
        value=ones(3, 1, 8),
    ),
    *(
        bad_call(
            update,
            f"value must have shape [num_tokens=3, num_kv_heads=1, head_size=8]; got [3, 1, 6]. {remedy}",
            kv_cache=ones(*shape),
            key=ones(3, 1, 8),
            value=ones(3, 1, 6),
        )
        for shape, remedy in (
            ((4, 2, 8), "Where V is a part of K, give key[..., :0] as value"),
            ((4, 2, 2, 8), "A V with another head size has a cache of its own, value_cache"),
        )
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
            "value_cache must have kv_cache's dtype float32; got float16. Make value_cache with that dtype",
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
        "key must have shape [num_tokens, num_kv_heads, head_size]; got [4, 2, 4, 8]. kv_cache comes first, then key",
        kv_cache=ones(3, 2, 8),
        key=ones(4, 2, 4, 8),
    ),
    bad_call(
        update,
        "key must have shape [num_tokens, num_kv_heads, head_size]; got [3, 16]. Give tokens, heads and the numbers of "
        "a head a dimension each",
        key=ones(3, 16),
    ),
    bad_call(
        update,
        "key must have dtype float32, float16 or bfloat16, or that of a quantized kv_cache; got int32. Cast key to "
        "one of them",
        key=ones(3, 2, 8, dtype=I32),
    ),
    bad_call(
        update,
        "value must have shape [num_tokens=3, num_kv_heads=2, head_size=8]; got [3, 1, 8]",
        value=ones(3, 1, 8),
    ),
    bad_call(
        update,
        "value must have key's dtype float32; got float16. Cast value to float32",
        value=ones(3, 2, 8, dtype=F16),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 2, 2, 8]. "
        "key has num_kv_heads=2, kv_cache 1. If it holds K alone, give V's cache as value_cache",
        kv_cache=ones(4, 2, 2, 8),
    ),
    bad_call(
        update,
        "kv_cache must have shape [num_blocks, block_size, 2 * num_kv_heads=4, head_size=8]; got [4, 0, 4, 8]",
        kv_cache=ones(4, 0, 4, 8),
    ),
    bad_call(
        update,
        "key must have kv_cache's dtype float16; got float32. Cast key to float16",
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
        "slot_mapping must have shape [num_tokens=3]; got [2]. It has a slot for each token of key",
        slot_mapping=ones(2, dtype=I32),
    ),
    bad_call(
        update,
        "slot_mapping must have dtype int32 or int64; got float32. Cast slot_mapping to one of them",
        slot_mapping=ones(3),
    ),
    *(
        bad_call(
            update,
            f"{name} must be None without cos_sin_cache{more}; got shape {list(array.shape)}",
            **{name: array},
        )
        for name, more, array in (
            ("query", ", q_norm and a hadamard of K", ones(3, 4, 8)),
            ("positions", "", ones(3, dtype=I32)),
        )
    ),
    *(
        bad_call(make, message, **arguments)
        for make, message, arguments in (
            (update, "query must be given with q_norm; got None", {"q_norm": ones(8)} | EPS),
            (
                rotated_update,
                "q_norm must have shape [head_size=8] or [num_heads=4, head_size]; got [2, 8]. It is "
                "the weight of a head, or those of all heads, which are normalized together",
                {"q_norm": ones(2, 8)} | EPS,
            ),
            (
                update,
                "k_norm must have shape [head_size=8] or [num_kv_heads=2, head_size]; got [7]. It is "
                "the weight of a head, or those of all heads, which are normalized together",
                {"k_norm": ones(7)} | EPS,
            ),
            (
                update,
                "k_norm must have dtype float32, or key's dtype float32; got float16. "
                "Cast k_norm to one of them",
                {"k_norm": ones(8, dtype=F16)} | EPS,
            ),
            (
                update,
                "norm_eps must be given with q_norm, k_norm and v_norm; got None. "
                "It is in the model's configuration, mostly 1e-6",
                {"k_norm": ones(8)},
            ),
            (
                update,
                "norm_eps must be None without q_norm, k_norm and v_norm; got 0.5. "
                "Leave norm_eps out",
                {"norm_eps": 0.5},
            ),
            *(
                (
                    update,
                    f"norm_eps must be finite in float32, and at least 0; got {eps}. "
                    "It is mostly 1e-6",
                    {"v_norm": True, "norm_eps": eps},
                )
                for eps in (-1.0, float("inf"), float("nan"))
            ),
            (
                update,
                "norm_offset must be 0 or 1; got 2. It is what the model adds to weights: 1 in Gemma 3",
                {"k_norm": ones(8), "norm_offset": 2} | EPS,
            ),
            (
                update,
                "norm_offset must be 0 without q_norm and k_norm; got 1. Leave norm_offset out",
                {"v_norm": True, "norm_offset": 1} | EPS,
            ),
            *(
                (
                    rotated_update,
                    f"{name} must be False without q_norm and k_norm; got True. Leave {name} out",
                    {"v_norm": True, name: True} | EPS,
                )
                for name in ("norm_after_rope", "norm_round_first")
            ),
            (
                update,
                "norm_after_rope must be False without cos_sin_cache; got True. "
                "Leave norm_after_rope out",
                {"k_norm": ones(8), "norm_after_rope": True} | EPS,
            ),
            (
                rotated_update,
                "norm_after_rope must be False with weights for all heads, [heads, head_size]; got "
                "True. Leave norm_after_rope out",
                {"k_norm": ones(2, 8), "norm_after_rope": True} | EPS,
            ),
            (
                update,
                "key must have dtype float32, float16 or bfloat16 with norms; got int8",
                {
                    "kv_cache": np.zeros((4, 2, 4, 8), np.int8),
                    "key": ones(3, 2, 8, dtype=np.int8),
                    "value": ones(3, 2, 8, dtype=np.int8),
                    "v_norm": True,
                }
                | EPS,
            ),
            *(
                (
                    update,
                    f"{name} must be {must} where V is a part of K, of which a part is normalized; "
                    f"got {got}. Normalize it before",
                    {
                        "kv_cache": np.zeros((4, 2, 8), F32),
                        "key": ones(3, 1, 8),
                        "value": ones(3, 1, 0),
                        name: value,
                    }
                    | EPS,
                )
                for name, must, got, value in (
                    ("k_norm", None, "shape [8]", ones(8)),
                    ("v_norm", False, True, True),
                )
            ),
        )
    ),
    *(
        bad_call(update, message, **arguments)
        for message, arguments in (
            (
                "hadamard must be 'k', 'v' or 'kv'; got 'vk'. It says whether K, which the query "
                "follows, and V are transformed",
                {"hadamard": "vk"},
            ),
            (
                "hadamard_signs must be None without hadamard; got shape [8]. "
                "Leave hadamard_signs out",
                {"hadamard_signs": ones(8)},
            ),
            (
                "hadamard_signs must have shape [head_size=8]; got [2, 8]. It has a sign, 1 or -1, "
                "for each number of a head",
                {"hadamard": "k", "hadamard_signs": ones(2, 8)},
            ),
            (
                "hadamard_signs must have dtype float32; got float16. "
                "Cast hadamard_signs to float32",
                {"hadamard": "k", "hadamard_signs": ones(8, dtype=F16)},
            ),
            (
                "hadamard_signs must be None for a V with another head size, 4, than K; got shape "
                "[8]. Leave hadamard_signs out",
                {
                    "kv_cache": np.zeros((4, 2, 2, 8), F32),
                    "value_cache": np.zeros((4, 2, 2, 4), F32),
                    "value": ones(3, 2, 4),
                    "hadamard": "kv",
                    "hadamard_signs": ones(8),
                },
            ),
            (
                "query must be None without cos_sin_cache, q_norm and a hadamard of K; got shape "
                "[3, 4, 8]. Leave query out",
                {"query": ones(3, 4, 8), "hadamard": "v"},
            ),
            (
                "key must have dtype float32, float16 or bfloat16 with hadamard; got int8",
                {
                    "kv_cache": np.zeros((4, 2, 4, 8), np.int8),
                    "key": ones(3, 2, 8, dtype=np.int8),
                    "value": ones(3, 2, 8, dtype=np.int8),
                    "hadamard": "kv",
                },
            ),
            (
                "key must have a head_size of at most 576 with hadamard; got 578. "
                "paged_attention reads no larger heads",
                {
                    "kv_cache": np.zeros((4, 2, 4, 578), F32),
                    "key": ones(3, 2, 578),
                    "value": ones(3, 2, 578),
                    "hadamard": "kv",
                },
            ),
            (
                "hadamard must be None where V is a part of K, whose blocks would be other ones; "
                "got 'k'. Leave hadamard out",
                {
                    "kv_cache": np.zeros((4, 2, 8), F32),
                    "key": ones(3, 1, 8),
                    "value": ones(3, 1, 0),
                    "hadamard": "k",
                },
            ),
        )
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
            f"from 2 to 8; got {list(shape)}{remedy}",
            cos_sin_cache=ones(*shape),
        )
        for shape, remedy in (
            ((2, 8, 2), ". It is the cosines and sines of a position in one row"),
            ((8, 0), ""),
            ((8, 3), ""),
            ((8, 10), ""),
        )
    ),
    bad_call(
        rotated_update,
        "cos_sin_cache must have dtype float32, or key's dtype float32; got float16. Cast cos_sin_cache to one of them",
        cos_sin_cache=ones(8, 4, dtype=F16),
    ),
    bad_call(
        rotated_update,
        "positions must have shape [num_tokens=3]; got [2]. It has a position for each token of key",
        positions=np.zeros(2, I32),
    ),
    bad_call(
        rotated_update,
        "positions must have dtype int32 or int64; got float32. Cast positions to one of them",
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
        "query must have key's dtype float32; got float16. Cast query to float32",
        query=ones(3, 4, 8, dtype=F16),
    ),
    bad_call(
        add,
        "a must have dtype float32; got int32. Cast a to float32",
        a=ones(2, 3, dtype=I32),
    ),
    bad_call(add, "b must have shape [2, 3]; got [3]. Nothing is broadcast", b=ones(3)),
    bad_call(
        add,
        "b must have dtype float32; got int32. Cast b to float32",
        b=ones(2, 3, dtype=I32),
    ),
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
_ROOM = ". Pass how many sequences there are, and arrays with room for them"
_SUMS = ". It has 0, then the running sums of the sequences' query lengths"
_LENGTH = ". Correct the length"
_TOO = ". Add the new tokens to the length, or correct query_start_loc"
_BLOCK = ". The sequence needs a block there, or a shorter length"
DYNAMIC = [
    bad_call(
        attention, "num_seqs must be from 0 to max_seqs=3; got 4" + _ROOM, num_seqs=np.array(4, I32)
    ),
    bad_call(
        attention,
        "num_seqs must be from 0 to max_seqs=3; got -1" + _ROOM,
        num_seqs=np.array([-1], I32),
    ),
    bad_call(
        attention,
        "num_seqs must be from 0 to max_seqs=3; got 5" + _ROOM,
        causal=False,
        num_seqs=np.array(5, I32),
    ),
    bad_call(
        attention,
        "query_start_loc[0] must be at least 0; got -1" + _SUMS,
        query_start_loc=np.array([-1, 2, 3, 0], I32),
    ),
    bad_call(
        attention,
        "query_start_loc must not decrease; got query_start_loc[2]=1 after query_start_loc[1]=2"
        + _SUMS,
        query_start_loc=np.array([0, 2, 1, 0], I32),
    ),
    bad_call(
        attention,
        "query_start_loc must give sequence 0 at most max_query_len=1 tokens; got 2. Raise max_query_len, or leave it out",
        max_query_len=1,
    ),
    bad_call(
        attention,
        "query_start_loc[2] must be at most num_tokens=4; got 5" + _SUMS,
        query_start_loc=np.array([0, 2, 5, 0], I32),
        context_lens=np.array([3, 3, 0], I32),
    ),
    bad_call(
        attention,
        "query_start_loc[2] must be at most num_tokens=4; got 5" + _SUMS,
        query_start_loc=np.array([0, 4, 5, 0], I32),  # all tokens have a sequence
        context_lens=np.array([4, 1, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[0] must be from 0 to max_blocks_per_seq=2 * block_size=2; got 5. Correct the length, "
        "or give block_tables more columns; or, if kv_cache has blocks of another size, name its dimensions in kv_layout",
        context_lens=np.array([5, 1, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[1] must be from 0 to max_blocks_per_seq=2 * block_size=2; got -2" + _LENGTH,
        context_lens=np.array([3, -2, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[0] must count the sequence's 2 query tokens too; got 1" + _TOO,
        context_lens=np.array([1, 1, 0], I32),
    ),
    bad_call(
        attention,
        "context_lens[1] must count the sequence's 1 query tokens too; got 0" + _TOO,
        context_lens=np.array([1, 0, 0], I32),
        causal=np.array([0, 1, 1], I32),
    ),
    bad_call(
        attention,
        "context_lens[0] must be from 0 to max_blocks_per_seq=2 * block_size=2; got -1" + _LENGTH,
        causal=False,
        context_lens=np.array([-1, 1, 0], I32),
    ),
    bad_call(
        attention,
        "block_tables[0, 1] must be from 0 to num_blocks - 1=3; got 4" + _BLOCK,
        block_tables=np.array([[3, 4], [0, 9], [9, 9]], I32),
    ),
    bad_call(
        attention,
        "block_tables[1, 0] must be from 0 to num_blocks - 1=3; got -1" + _BLOCK,
        block_tables=np.array([[3, 1], [-1, 9], [9, 9]], I32),
    ),
    bad_call(
        attention,
        "block_tables[0, 0] must be from 0 to num_blocks - 1=-1; got 3" + _BLOCK,
        kv_cache=ones(0, 2, 4, 8),
    ),
    bad_call(
        attention,
        "block_tables[0, 0] must be from 0 to num_blocks - 1=3; got 9" + _BLOCK,
        sliding_window=1,
        context_lens=np.array([4, 1, 0], I32),
        block_tables=np.array([[9, 1], [0, 9], [9, 9]], I32),
        bidirectional_ranges=np.array([[0, 0], [0, 2], [-5, -1], [0, 0]], I32),
    ),
    bad_call(
        attention,
        "tree_mask[1] must have bits of the sequence's 2 query tokens only; got [4, 0]. Clear the other bits",
        tree_mask=np.array([[1, 0], [4, 0], [0, 0], [-1, -1]], I32),
    ),
    bad_call(
        attention,
        "tree_mask[2] must have bits of the sequence's 1 query tokens only; got [1, -2147483648]. Clear the other bits",
        tree_mask=np.array([[1, 0], [3, 0], [1, -(2**31)], [-1, -1]], I32),
    ),
    bad_call(
        attention,
        "tree_mask[64] must have no bits, as the sequence has more than 64 query tokens; got [1, 0]. Clear the other bits",
        query=ones(66, 4, 8),
        kv_cache=ones(40, 2, 4, 8),
        block_tables=np.arange(120, dtype=I32).reshape(3, 40) % 40,
        context_lens=np.array([66, 0, 0], I32),
        query_start_loc=np.array([0, 66, 66, 66], I32),
        tree_mask=np.eye(66, 2, -64, I32),
    ),
    bad_call(
        update,
        "slot_mapping[1] must be below num_blocks * block_size=8 (negative for padding); got 8. Correct the slot, "
        "or give kv_cache more blocks",
        slot_mapping=np.array([0, 8, -1], I32),
    ),
    *(
        bad_call(
            rotated_update,
            "positions[1] must be from 0 to max_positions - 1=7, as the token has a slot; "
            f"got {position}. Correct the position, or give cos_sin_cache more rows",
            positions=np.array([0, position, 8], I32),
        )
        for position in (8, -1)
    ),
]


@dataclass(frozen=True)
class Mistake:
    """A call of a frontend's function that its annotations forbid, or that only a function can refuse."""

    function: str
    changes: dict[str, Any]
    messages: dict[str, str]  # by frontend; a frontend that is not here accepts the call


FUNCTIONS: dict[str, dict[str, Any]] = {
    "paged_attention": attention(),
    "kv_cache_update": update(),
    "simple_add": add(),
    "varlen_attention": {
        "query": ones(4, 4, 8),
        "key": ones(4, 2, 8),
        "value": ones(4, 2, 8),
        "query_start_loc": np.array([0, 2, 4], I32),
        "num_seqs": np.array(2, I32),
        "scale": 0.5,
    },
    "hadamard": {"x": ones(4, 4, 8)},
    "merge_attention": {"outputs": ones(2, 4, 4, 8), "lses": ones(2, 4, 4)},
    "slot_mapping": {x: attention()[x] for x in METADATA} | {"block_size": 2, "num_tokens": 4},
    "pad_batch": {
        "tokens": [[1, 2]],
        "context_lens": [2],
        "blocks": [[0]],
        "block_size": 2,
        "num_tokens": 4,
        "max_seqs": 3,
        "max_blocks_per_seq": 2,
    },
}
"""A sound call of each function."""


def mistake(
    function: str, message: str = "", *, jax: str = "", torch: str = "", **changes: Any
) -> Any:
    """One message for both frontends, or one for each."""
    messages = {"jax": jax or message, "torch": torch or message}
    found = Mistake(function, changes, {name: x for name, x in messages.items() if x})
    return pytest.param(found, id=f"{function}-{[*changes]}-{message or jax or torch}"[:90])


_TENSOR = "must have type torch.Tensor; got"
_APART = "Give outputs and log-sum-exps apart: merge_attention(*zip(*parts))"
_FIRST = "The first of what kv_cache_update returns is the cache. K and V apart are kv_cache and value_cache"
_RAGGED = {
    "jax": "block_tables must be an array; got type list. Its rows must have one length",
    "torch": f"block_tables {_TENSOR} list. Pass torch.tensor(block_tables, dtype=torch.int32)",
}

MISTAKES = [
    *(
        mistake(
            "paged_attention",
            jax=f"kv_cache must be an array; got a {kind.__name__} of 2. {_FIRST}",
            torch=f"kv_cache {_TENSOR} {kind.__name__}. K and V as two tensors are kv_cache and value_cache",
            kv_cache=kind([ones(4, 2, 2, 8), ones(4, 2, 2, 8)]),
        )
        for kind in (list, tuple)
    ),
    mistake(
        "kv_cache_update",
        jax=f"kv_cache must be an array; got a tuple of 2. {_FIRST}",
        torch=f"kv_cache {_TENSOR} tuple. K and V as two tensors are kv_cache and value_cache",
        kv_cache=(np.zeros((4, 2, 4, 8), F32), ones(3, 4, 8)),
    ),
    mistake(
        "paged_attention",
        jax="kv_cache must be an array; got type dict. Pass numbers",
        torch=f"kv_cache {_TENSOR} dict. Pass a tensor",
        kv_cache={"key": 1},
    ),
    mistake("paged_attention", **_RAGGED, block_tables=[[3, 1], [0], [9, 9]]),
    mistake(
        "paged_attention",
        jax="context_lens must have shape [max_seqs]; got []. The lengths of all sequences are one array",
        torch=f"context_lens {_TENSOR} int. Pass torch.tensor(context_lens, dtype=torch.int32)",
        context_lens=3,
    ),
    mistake(
        "paged_attention",
        torch=f"num_seqs {_TENSOR} int. Pass torch.tensor(num_seqs, dtype=torch.int32)",
        num_seqs=2,
    ),
    mistake(
        "paged_attention",
        jax="num_seqs must be an array; got type str. Pass numbers",
        torch=f"num_seqs {_TENSOR} str. Pass a tensor",
        num_seqs="2",
    ),
    mistake(
        "paged_attention",
        torch=f"alibi_slopes {_TENSOR} list. Pass torch.tensor(alibi_slopes, dtype=torch.float32)",
        alibi_slopes=[0.5, 0.25, 0.125, 0.1],
    ),
    mistake(
        "kv_cache_update",
        torch=f"cos_sin_cache {_TENSOR} tuple. Join its tensors to one, with torch.cat",
        jax="cos_sin_cache must have shape [max_positions, rotary_dim], with an even rotary_dim from 2 to 8; got "
        "[2, 8, 4]. It is the cosines and sines of a position in one row",
        positions=np.zeros(3, I32),
        cos_sin_cache=(ones(8, 4), ones(8, 4)),
    ),
    *(
        mistake(
            function,
            f"{name} must have type {kind}; got {got}. {remedy}",
            **{name: value},
            **others,
        )
        for function, name, kind, value, got, remedy, others in (
            ("paged_attention", "scale", "float", "0.1", "str", "Pass a number", {}),
            (
                "paged_attention",
                "scale",
                "float",
                None,
                "NoneType",
                "Give it: it is usually head_size ** -0.5",
                {},
            ),
            (
                "varlen_attention",
                "scale",
                "float",
                None,
                "NoneType",
                "Give it: it is usually head_size ** -0.5",
                {},
            ),
            ("paged_attention", "soft_cap", "float", "30", "str", "Pass a number", {}),
            (
                "paged_attention",
                "sliding_window",
                "int",
                (4, 0),
                "tuple",
                "Pass a whole number",
                {},
            ),
            ("paged_attention", "sliding_window", "int", True, "bool", "Pass a whole number", {}),
            (
                "paged_attention",
                "max_query_len",
                "int",
                1.0,
                "float",
                "Pass int(max_query_len)",
                {},
            ),
            (
                "varlen_attention",
                "max_query_len",
                "int",
                2.0,
                "float",
                "Pass int(max_query_len)",
                {},
            ),
            (
                "paged_attention",
                "value_head_size",
                "int",
                8.0,
                "float",
                "Pass int(value_head_size)",
                {"kv_cache": ones(4, 2, 8)},
            ),
            ("paged_attention", "causal", "bool", 1, "int", "Pass bool(causal)", {}),
            (
                "paged_attention",
                "causal",
                "bool",
                "no",
                "str",
                "Pass True or False, or an array with one for each sequence",
                {},
            ),
            ("paged_attention", "return_lse", "bool", 1, "int", "Pass bool(return_lse)", {}),
            ("paged_attention", "return_lse", "bool", "yes", "str", "Pass True or False", {}),
            ("paged_attention", "kv_layout", "str", 4, "int", "Pass a string, such as 'n2bhd'", {}),
            (
                "kv_cache_update",
                "interleaved",
                "bool",
                1,
                "int",
                "Pass bool(interleaved)",
                {"positions": np.zeros(3, I32), "cos_sin_cache": ones(8, 4)},
            ),
            (
                "kv_cache_update",
                "hadamard",
                "str",
                True,
                "bool",
                "Pass a string, such as 'kv'",
                {},
            ),
            (
                "kv_cache_update",
                "norm_offset",
                "int",
                "1",
                "str",
                "Pass a whole number",
                {"k_norm": ones(8), "norm_eps": 1e-6},
            ),
            (
                "kv_cache_update",
                "norm_eps",
                "float",
                "1e-6",
                "str",
                "Pass a number",
                {"k_norm": ones(8)},
            ),
            ("slot_mapping", "block_size", "int", 2.0, "float", "Pass int(block_size)", {}),
            ("slot_mapping", "num_tokens", "int", "4", "str", "Pass a whole number", {}),
            ("slot_mapping", "num_tokens", "int", None, "NoneType", "Pass a whole number", {}),
            ("pad_batch", "max_seqs", "int", None, "NoneType", "Pass a whole number", {}),
        )
    ),
    mistake(
        "slot_mapping",
        jax="block_size must have type int; got ArrayImpl. Pass int(block_size)",
        torch="block_size must have type int; got Tensor. Pass int(block_size)",
        block_size=np.array(2, I32),
    ),
    mistake(
        "slot_mapping",
        "context_lens must have shape [max_seqs]; got []. The lengths of all sequences are one array",
        context_lens=np.array(2, I32),
    ),
    mistake(
        "varlen_attention",
        "key must have shape [num_tokens, num_kv_heads, head_size]; got [4, 2, 4, 8]. Pack the tokens of all sequences "
        "into one dimension",
        key=ones(4, 2, 4, 8),
    ),
    mistake(
        "varlen_attention",
        "sinks must have dtype float32; got float16. Cast sinks to float32",
        sinks=ones(4, dtype=F16),
    ),
    mistake(
        "varlen_attention",
        "prefix_seqs must have shape [max_seqs=2]; got [3]. It has a number for each sequence, and "
        "for those that pad",
        prefix_seqs=np.zeros(3, I32),
    ),
    mistake(
        "varlen_attention",
        "prefix_seqs must have dtype int32; got float32. Cast prefix_seqs to int32",
        prefix_seqs=ones(2),
    ),
    mistake(
        "varlen_attention",
        torch=f"query_start_loc {_TENSOR} list. Pass torch.tensor(query_start_loc, dtype=torch.int32)",
        query_start_loc=[0, 2, 4],
    ),
    mistake(
        "simple_add",
        jax="b must have shape [2, 3]; got []. Nothing is broadcast",
        torch=f"b {_TENSOR} float. Pass torch.tensor(b, dtype=torch.float32)",
        b=1.0,
    ),
    mistake(
        "hadamard",
        "x must have shape [..., head_size]; got [4, 0]. The last dimension has the numbers of a head",
        x=ones(4, 0),
    ),
    mistake(
        "hadamard",
        "x must have dtype float32, float16 or bfloat16; got int32. Cast x to one of them",
        x=ones(4, 8, dtype=I32),
    ),
    mistake(
        "merge_attention",
        "outputs must have shape [num_parts, num_tokens, num_heads, head_size], of at least one part; got [4, 4, 8]. "
        "One part is a list of one array",
        outputs=ones(4, 4, 8),
    ),
    mistake(
        "merge_attention",
        f"outputs[1] must have shape [4, 4, 8] as outputs[0] has; got [4, 4]. {_APART}",
        outputs=(ones(4, 4, 8), ones(4, 4)),
    ),
    mistake(
        "merge_attention",
        f"outputs must have type array, or be a sequence of arrays; got tuple. {_APART}",
        outputs=[(ones(4, 4, 8), ones(4, 4))],
    ),
    mistake(
        "merge_attention",
        "lses must have shape [num_parts=2, num_tokens=4, num_heads=4]; got [1, 4, 4]. It has a number for each head of "
        "outputs, in as many parts",
        lses=[ones(4, 4)],
    ),
    mistake(
        "merge_attention",
        "lses must have dtype float32; got float16. Cast lses to float32",
        lses=ones(2, 4, 4, dtype=F16),
    ),
    *(
        mistake(
            "pad_batch",
            f"{name} must have {rule} for each sequence; got {got}. Pass {rule} for each sequence",
            **{name: value},
        )
        for name, rule, value, got in (
            ("tokens", "a list of integers", [1, 2], "int"),
            ("tokens", "a list of integers", None, "NoneType"),
            ("tokens", "a list of integers", [[1, 2], 3], "int"),
            ("blocks", "a list of integers", [0], "int"),
            ("context_lens", "an integer", 2, "int"),
        )
    ),
    mistake(
        "pad_batch",
        "context_lens[0] must count at least its 2 new tokens, and at most the 2 that its 1 blocks hold; got 3. "
        "BlockPool.grow adds blocks",
        context_lens=[3],
    ),
]
"""What a person writes at night, none of which the op's check sees."""
