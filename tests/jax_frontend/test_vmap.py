"""jax.vmap: a batch of calls becomes one call, with the same bits and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_frontend
from harness import hlo
from harness.compare import assert_same_bits
from harness.hlo import ATTENTION, UPDATE
from harness.layouts import LATENT_LAYOUTS, LAYOUTS
from jax_frontend._vmap import paged_attention as vmapped
from jax_frontend._vmap import varlen_attention as packed_calls
from jax_frontend._vmap.operands import Operand
from shared_ffi import varlen_attention
from tests.cases.bad_calls import DYNAMIC, BadCall
from tests.cases.case import DECODE, JUNK, MIXED, SHORT_NAMES, Case, Groups
from tests.cases.sound_calls import add, attention, split, update
from tests.cases.updates import UpdateCase
from tests.cases.varlen import VarlenCase
from tests.support import varlen_calls as packed
from tests.support.backends import JAX_ERRORS
from tests.support.calls import split_keywords
from tests.support.gpu import Gpu
from tests.support.gpu import attend as attend_on

PACKED_ATTENTION = varlen_attention.TARGET
BATCHES = (MIXED, DECODE, (), ((0, 0), (2, 3)), ((9, 21),))

Tree = Any


def one_by_one(function: Callable[..., Any], in_axes: Tree, *operands: Tree) -> Any:
    """The meaning of jax.vmap: makes each call and stacks the results."""
    function = jax.jit(function)
    axes = jax.tree.leaves(in_axes, is_leaf=lambda axis: axis is None)
    leaves, tree = jax.tree.flatten(operands)
    (size,) = {np.shape(x)[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None}
    results = [
        function(
            *jax.tree.unflatten(
                tree,
                [
                    x if axis is None else np.take(np.asarray(x), i, axis)
                    for x, axis in zip(leaves, axes, strict=True)
                ],
            )
        )
        for i in range(size)
    ]
    return jax.tree.map(lambda *each: np.stack([np.asarray(x) for x in each]), *results)


def check(
    function: Callable[..., Any], in_axes: Tree, *operands: Tree, target: str, loops: bool = False
) -> None:
    """Checks that vmap makes one call, or a loop where that is expected, and gives each call's
    bits."""
    compiled = jax.jit(jax.vmap(function, in_axes)).lower(*operands).compile()
    text = compiled.as_text()
    assert text is not None
    assert len(hlo.custom_calls(text, target)) == 1 and (" while(" in text) == loops
    expected = one_by_one(function, in_axes, *operands)
    assert_same_bits(jax.tree.map(np.asarray, compiled(*operands)), expected)


def enlarged(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Enlarges an array with values that nothing may read."""
    junk: Any = np.nan
    if array.dtype == np.int32:
        junk = np.random.default_rng(0).choice(JUNK, shape)
    elif array.dtype in (np.int8, np.uint8):
        junk = 127
    larger = np.full(shape, junk, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger


def calls_of_one_shape(**fields: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Different calls, each with its own cache. Returns stacked operands, stacked keyword operands
    and options."""
    cases = [
        Case(id=f"call-{i}", sequences=sequences, first_token=i % 3, **fields)
        for i, sequences in enumerate(BATCHES)
    ]
    return stacked(cases)


def stacked(cases: Sequence[Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    arrays, options = zip(*(split_keywords(case.attributes()) for case in cases), strict=True)

    def stack(*each: Any) -> np.ndarray:
        shape = np.max([np.shape(x) for x in each], axis=0).astype(int)
        return np.stack([enlarged(np.asarray(x), shape) for x in each])

    inputs = [stack(*each) for each in zip(*(case.inputs() for case in cases), strict=True)]
    return inputs, jax.tree.map(stack, *arrays), options[0]


def attention_of(options: dict[str, Any]) -> Callable[..., Any]:
    return lambda inputs, arrays: jax_frontend.paged_attention(*inputs, **arrays, **options)


FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    **{short: {"dtype": dtype} for dtype, short in SHORT_NAMES.items() if short != "f32"},
    "window-and-cap": {"sliding_window": 5, "soft_cap": 3.0},
    "lse": {"return_lse": True},
    "sinks-and-alibi": {"sinks": True, "alibi_slopes": True, "return_lse": True},
    "not-causal": {"causal": False, "window_right": 2, "sliding_window": 4},
    "causal-by-sequence": {"causal": False, "causal_seqs": True, "window_right": 2},
    "num-seqs-of-rank-1": {"num_seqs_shape": (1,)},
    "one-scale": {"cache_dtype": "int8", "scales": "one"},
    "scales-per-head": {"cache_dtype": "float8_e4m3fn", "scales": "per head", "kv_layout": "2nbhd"},
    "scales-per-position": {"cache_dtype": "float8_e5m2", "scales": "per position"},
    "4-bits": {"cache_dtype": "int4", "scales": "per head"},
    "groups": {"cache_dtype": "e2m1", "groups": Groups(8, "float8_e4m3fn")},
    "8-and-4-bits": {
        "cache_dtype": "int8",
        "value_cache_dtype": "int4",
        "scales": "per position",
        "kv_layout": "nhbd",
    },
    "scales-per-position-in-hnbd": {
        "cache_dtype": "int8",
        "scales": "per position",
        "kv_layout": "hnbd",
    },
    **{f"layout-{layout}": {"kv_layout": layout} for layout in LAYOUTS},
    **{
        f"latent-{layout}": {"kv_layout": layout, "value_head_size": 9, "num_kv_heads": 1}
        for layout in (None, *LATENT_LAYOUTS)
    },
    "own-value-head-size": {"kv_layout": "nhbd", "own_value_head_size": 9},
}
CALL_FEATURES = FEATURES | {
    "trees": {"tree": "draft"},
    "ranges": {"ranges": "any"},
}  # which only calls with their own lengths have
SHARED_BY_CALLS = ("sinks", "alibi_slopes")  # the same for all calls, or vmap loops


def keyword_axes(arrays: dict[str, Any]) -> dict[str, int | None]:
    """The mapped axes of `calls_of_one_shape`. Arrays with one value for each head are not
    mapped."""
    return {
        name: None if name in SHARED_BY_CALLS or x.ndim <= 2 else 0 for name, x in arrays.items()
    }


def unstacked(arrays: dict[str, Any], axes: dict[str, int | None]) -> dict[str, Any]:
    return {name: x[0] if axes[name] is None else x for name, x in arrays.items()}


@pytest.mark.parametrize("feature", CALL_FEATURES)
def test_each_call_has_its_own_cache(feature: str) -> None:
    inputs, arrays, options = calls_of_one_shape(**CALL_FEATURES[feature])
    axes = keyword_axes(arrays)
    arrays = unstacked(arrays, axes)
    check(attention_of(options), ([0] * 6, axes), inputs, arrays, target=ATTENTION)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_calls_share_a_cache(feature: str) -> None:
    """The calls read one cache with different queries, numbers of sequences and lengths."""
    case = Case(id="shared", sequences=MIXED, padding_tokens=4, **FEATURES[feature])
    query, kv_cache, lengths, tables, starts, num_seqs = case.inputs()
    arrays, options = split_keywords(case.attributes())
    counts = [len(MIXED), 0, 1, len(MIXED) - 2]
    shorter = [np.where(np.arange(len(lengths)) < 4, lengths - i % 2, lengths) for i in range(4)]
    shorter = [lengths, shorter[1], lengths, lengths]
    inputs = [
        np.stack([query * query.dtype.type(i + 1) for i in range(4)]),
        kv_cache,
        np.stack(shorter),
        tables,
        np.stack([starts, starts, starts, starts + (np.arange(len(starts)) < 6) * np.int32(2)]),
        np.stack([np.full_like(num_seqs, count) for count in counts]),
    ]
    check(
        attention_of(options),
        ([0, None, 0, None, 0, 0], dict.fromkeys(arrays)),
        *(inputs, arrays),
        target=ATTENTION,
    )


@pytest.mark.parametrize("mapped", ["kv_cache", "value_cache", "k_scale"])
def test_one_array_of_the_cache_is_mapped(mapped: str) -> None:
    inputs, arrays, options = calls_of_one_shape(
        cache_dtype="int8", scales="per position", kv_layout="nhbd"
    )
    axes: dict[str, int | None] = {name: 0 if name == mapped else None for name in arrays}
    cache_axis = 0 if mapped == "kv_cache" else None
    inputs = [x if i == 1 and cache_axis == 0 else x[0] for i, x in enumerate(inputs)]
    check(
        attention_of(options),
        ([None, cache_axis, *[None] * 4], axes),
        *(inputs, unstacked(arrays, axes)),
        target=ATTENTION,
        loops=mapped == "k_scale",  # otherwise the cache would be copied
    )


@pytest.mark.parametrize(
    ("mapped", "fields"),
    [
        ("sinks", {"sinks": True}),
        ("alibi_slopes", {"alibi_slopes": True}),
        ("v_scale", {"cache_dtype": "int8", "scales": "per head"}),
    ],
)
def test_mapped_arrays_of_heads_are_looped_over(mapped: str, fields: dict[str, Any]) -> None:
    case = Case(id="loop", sequences=MIXED, **fields)
    arrays, options = split_keywords(case.attributes())
    axes: dict[str, int | None] = {name: 0 if name == mapped else None for name in arrays}
    arrays[mapped] = np.stack([arrays[mapped], arrays[mapped] * 2])
    axes_and_arrays = ([None] * 6, axes), list(case.inputs()), arrays
    check(attention_of(options), *axes_and_arrays, target=ATTENTION, loops=True)

    # An outer vmap is folded into the calls of the loop.
    twice = jax.vmap(attention_of(options), axes_and_arrays[0])
    query, *rest = case.inputs()
    inputs = [np.stack([query, query * 2, query * 3]), *rest]
    around = ([0, *[None] * 5], dict.fromkeys(arrays))
    check(twice, around, inputs, arrays, target=ATTENTION, loops=True)


def test_nested_vmap() -> None:
    inputs, arrays, options = calls_of_one_shape(return_lse=True, kv_layout="n2hbd")
    inner = jax.vmap(attention_of(options), ([0] * 6, {}))
    twice = [np.stack([x, x[::-1]]) for x in inputs]
    check(inner, ([0] * 6, {}), twice, arrays, target=ATTENTION)
    # The outer vmap maps queries. The inner vmap maps caches and the rest.
    queries = [np.stack([inputs[0], inputs[0] * 2, inputs[0][::-1]]), *inputs[1:]]
    check(inner, ([0, *[None] * 5], {}), queries, arrays, target=ATTENTION)
    # The outer vmap maps caches. The inner vmap does not.
    inner = jax.vmap(attention_of(options), ([0, None, *[0] * 4], {}))
    caches = [np.stack([inputs[0]] * len(BATCHES)), *inputs[1:]]
    caches[2:] = [
        np.stack([np.stack([x[i]] * len(BATCHES)) for i in range(len(x))]) for x in inputs[2:]
    ]
    check(inner, ([0] * 6, {}), caches, arrays, target=ATTENTION)


def test_mapped_axes_other_than_the_first() -> None:
    inputs, _, options = calls_of_one_shape()
    attend = attention_of(options)
    expected = one_by_one(attend, ([0] * 6, {}), inputs, {})
    moved = [np.moveaxis(x, 0, -1 if i in (1, 2) else i and 1) for i, x in enumerate(inputs[:5])]
    in_axes = ([-1 if i in (1, 2) else i and 1 for i in range(5)] + [0], {})
    result = jax.vmap(attend, in_axes, out_axes=2)([*moved, inputs[5]], {})
    assert_same_bits(np.moveaxis(np.asarray(result), 2, 0), expected)


def test_batches_of_no_calls_and_of_one_call() -> None:
    inputs, _, options = calls_of_one_shape(return_lse=True)
    attend = attention_of(options)
    for size in (0, 1):
        some = [x[:size] for x in inputs]
        results = jax.vmap(attend, ([0] * 6, {}))(some, {})
        assert [x.shape for x in results] == [some[0].shape, some[0].shape[:-1]]
    assert_same_bits(jax.tree.map(np.asarray, results), one_by_one(attend, ([0] * 6, {}), some, {}))


@pytest.mark.parametrize(("tokens", "places"), [(0, 3), (4, 0), (0, 0)])
def test_no_tokens_and_no_sequences(tokens: int, places: int) -> None:
    operands = (
        np.full((2, tokens, 4, 8), np.nan, np.float32),
        np.full((2, 4, 2, 4, 8), np.nan, np.float32),
        np.zeros((2, places), np.int32),
        np.zeros((2, places, 2), np.int32),
        np.zeros((2, places + 1), np.int32),
        np.array([0, places], np.int32),
    )
    attend = partial(jax_frontend.paged_attention, scale=0.5, return_lse=True)
    expected = one_by_one(attend, (0,) * 6, *operands)
    assert_same_bits(jax.tree.map(np.asarray, jax.vmap(attend)(*operands)), expected)


SETTINGS = {
    "x64": partial(jax.enable_x64, True),
    "strict-promotion": partial(jax.numpy_dtype_promotion, "strict"),
    "strict-rank": partial(jax.numpy_rank_promotion, "raise"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_under_settings_of_jax(setting: str) -> None:
    inputs, _, options = calls_of_one_shape(return_lse=True)
    case = UpdateCase(id="settings", slot_dtype="int64" if setting == "x64" else "int32")
    with SETTINGS[setting]():
        check(attention_of(options), ([0] * 6, {}), inputs, {}, target=ATTENTION)
        operands = [np.stack([x, x]) for x in case.inputs()]
        check(jax_frontend.kv_cache_update, (0,) * 4, *operands, target=UPDATE)


CACHES = ("value_cache", "k_scale_cache", "v_scale_cache")
STACKED = (*CACHES, "query", "positions")
UPDATES: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"dtype": "bfloat16"},
    "no-tokens": {"num_tokens": 0, "num_padding": 0},
    "8-bits": {"cache_dtype": "float8_e4m3fn", "scales": "per head"},
    "scales-per-position": {"cache_dtype": "int8", "scales": "per position"},
    "4-bits": {"cache_dtype": "int4", "scales": "per head", "head_size": 18},
    "made-scales": {"cache_dtype": "int8", "made_scales": ("k_scale", "v_scale")},
    "made-groups": {
        "cache_dtype": "e2m1",
        "groups": Groups(8, "float8_e4m3fn"),
        "made_scales": ("k_scale", "v_scale"),
        "head_size": 16,
    },
    "made-scales-rotated": {
        "cache_dtype": "int4",
        "made_scales": ("k_scale", "v_scale"),
        "kv_layout": "nhbd",
        "rotary_dim": 8,
        "num_heads": 4,
        "head_size": 18,
    },
    "rotated": {"rotary_dim": 8, "num_heads": 4, "interleaved": True},
    "normalized": {"norm": "per head", "num_heads": 4, "v_norm": True, "rotary_dim": 8},
    "normalized-together": {
        "norm": "all heads",
        "num_heads": 4,
        "cache_dtype": "int8",
        "scales": "one",
    },
    "hadamard": {"hadamard": "kv", "has_signs": True, "num_heads": 4, "head_size": 24},
    "rotated-keys-alone": {"rotary_dim": 16, "kv_layout": "nhbd"},
    "rotated-two-arrays": {"rotary_dim": 16, "num_heads": 2, "kv_layout": "nhbd"},
    **{f"layout-{layout}": {"kv_layout": layout} for layout in LAYOUTS},
    **{
        f"latent-{layout}": {"kv_layout": layout, "is_latent": True, "num_kv_heads": 1}
        for layout in (None, *LATENT_LAYOUTS)
    },
    "own-value-head-size": {"kv_layout": "nhbd", "own_value_head_size": 9},
}


def updates(**fields: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Like `calls_of_one_shape`, for kv_cache_update. The scales are not stacked."""
    cases = [UpdateCase(id=f"update-{i}", **fields) for i in range(3)]
    inputs = [np.stack(each) for each in zip(*(case.inputs() for case in cases), strict=True)]
    arrays, options = zip(*(split_keywords(case.attributes()) for case in cases), strict=True)
    stacked = {
        name: np.stack([each[name] for each in arrays]) if name in STACKED else x
        for name, x in arrays[0].items()
    }
    return inputs, stacked, options[0]


def update_of(options: dict[str, Any]) -> Callable[..., Any]:
    return lambda inputs, arrays: jax_frontend.kv_cache_update(*inputs, **arrays, **options)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("fields", UPDATES.values(), ids=UPDATES)
def test_update(fields: dict[str, Any], is_shared: bool) -> None:
    """If the calls share a cache, each updates its own copy."""
    inputs, arrays, options = updates(**fields)
    cache_axis = None if is_shared else 0
    if is_shared:
        inputs[0] = inputs[0][0]
        arrays = {name: x[0] if name in CACHES else x for name, x in arrays.items()}
    axes = {name: 0 if name in STACKED else None for name in arrays}
    axes |= {name: cache_axis for name in CACHES if name in arrays}
    check(update_of(options), ([cache_axis, 0, 0, 0], axes), inputs, arrays, target=UPDATE)


@pytest.mark.parametrize("name", ["cos_sin_cache", "k_norm", "hadamard_signs"])
def test_updates_with_several_tables_are_looped_over(name: str) -> None:
    hadamard = {"hadamard": "kv", "has_signs": True, "head_size": 24}
    inputs, arrays, options = updates(rotary_dim=8, num_heads=4, norm="per head", **hadamard)
    table = arrays[name]
    arrays[name] = np.stack([table, -table, 2 * table])
    axes = {x: 0 if x in (*STACKED, name) else None for x in arrays}
    check(update_of(options), ([0] * 4, axes), inputs, arrays, target=UPDATE, loops=True)


def test_update_of_one_argument() -> None:
    inputs, _, _ = updates()
    for mapped in range(4):
        axes = tuple(0 if i == mapped else None for i in range(4))
        operands = [x if i == mapped else x[0] for i, x in enumerate(inputs)]
        check(jax_frontend.kv_cache_update, axes, *operands, target=UPDATE)


def test_nested_vmap_of_updates() -> None:
    inputs, _, _ = updates()
    inner = jax.vmap(jax_frontend.kv_cache_update)
    check(inner, (0,) * 4, *[np.stack([x, x[::-1]]) for x in inputs], target=UPDATE)


def test_the_last_token_of_a_slot_is_kept() -> None:
    cache, key, _, slots = split(update(slot_mapping=np.array([3, 3, 3], np.int32)))[0]
    keys = np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1) + key
    check(jax_frontend.kv_cache_update, (None, 0, 0, None), cache, keys, keys, slots, target=UPDATE)


def test_scales_of_an_update_are_looped_over() -> None:
    inputs, arrays, options = updates(cache_dtype="int8", scales="one")
    arrays["k_scale"] = np.stack([arrays["k_scale"] * i for i in (1, 2, 3)])
    axes = {"k_scale": 0, "v_scale": None}
    check(update_of(options), ([0] * 4, axes), inputs, arrays, target=UPDATE, loops=True)


def test_donated_caches_are_updated_in_place() -> None:
    caches, *rest = map(jnp.asarray, updates()[0])
    expected = one_by_one(jax_frontend.kv_cache_update, (0,) * 4, caches, *rest)
    step = jax.jit(jax.vmap(jax_frontend.kv_cache_update), donate_argnums=0)
    optimized = step.lower(caches, *rest).compile().as_text()
    assert "input_output_alias={ {}: (0, {}, may-alias) }" in optimized
    assert " copy(" not in optimized
    address = caches.unsafe_buffer_pointer()
    for _ in range(3):
        caches = step(caches, *rest)
        assert caches.unsafe_buffer_pointer() == address
    assert_same_bits(np.asarray(caches), expected)


def test_ragged_paged_attention_v3() -> None:
    """ragged_paged_attention_v3 becomes one update and one attention for all calls."""
    rng = np.random.default_rng(0)

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, np.float32)

    metadata = [[20, 5], [7, 2, 9, 4], [0, 1, 6], [1, 1, 2]]
    arrays = [normal(3, 6, heads, 16) for heads in (8, 2, 2)]
    arrays += [normal(3, 16, 16, 4, 1, 16), *(np.array([x] * 3, np.int32) for x in metadata)]
    arrays[4][1, 1], arrays[7][2, 2] = 7, 1
    attend = jax.vmap(jax_frontend.ragged_paged_attention_v3)
    text = jax.jit(attend).lower(*arrays).compile().as_text()
    assert text is not None
    assert [len(hlo.custom_calls(text, x)) for x in (ATTENTION, UPDATE)] == [1, 1]
    expected = one_by_one(jax_frontend.ragged_paged_attention_v3, (0,) * 8, *arrays)
    assert_same_bits(jax.tree.map(np.asarray, attend(*arrays)), expected)


PACKED = ((5, 0, 3, 9), (17,), (), (1, 1, 14, 2, 4))
PACKED_FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"dtype": "bfloat16", "num_heads": 3, "num_kv_heads": 1},
    "sinks": {"arrays": ("sinks",), "options": {"window_right": 2, "causal": False}},
    "prefixes": {"arrays": ("prefix_seqs",), "options": {"max_query_len": 17}},
    "everything": {
        "value_head_size": 8,
        "arrays": ("sinks", "alibi_slopes", "bidirectional_ranges", "causal", "prefix_seqs"),
        "options": {"soft_cap": 3.0, "sliding_window": 6, "window_right": 2},
    },
}


def packed_of(options: dict[str, Any]) -> Callable[..., Any]:
    return lambda inputs, arrays: jax_frontend.varlen_attention(*inputs, **arrays, **options)


def gradients_of(options: dict[str, Any]) -> Callable[..., Any]:
    """The gradients of a call's output, and of the numbers of heads."""

    def gradients(inputs: Any, arrays: Any) -> Any:
        leaves = [*inputs[:3], {name: arrays[name] for name in SHARED_BY_CALLS if name in arrays}]

        def loss(query: Any, key: Any, value: Any, of_heads: Any) -> Any:
            output = packed_of(options)([query, key, value, *inputs[3:]], arrays | of_heads)
            return jnp.square(output.astype(jnp.float32)).sum()

        return (*jax.tree.leaves(jax.grad(loss, (0, 1, 2, 3))(*leaves)),)

    return gradients


@pytest.mark.parametrize("feature", PACKED_FEATURES)
def test_packed_sequences(feature: str) -> None:
    """Each call has its own sequences, and one has none. Calls that sum up gradients of sinks or slopes are
    looped over."""
    fields = PACKED_FEATURES[feature]
    cases = [VarlenCase(str(x), x, padding=i % 3, **fields) for i, x in enumerate(PACKED)]
    inputs, arrays, options = stacked(cases)
    axes = {name: None if name in SHARED_BY_CALLS else 0 for name in arrays}
    arrays = unstacked(arrays, axes)
    check(packed_of(options), ([0] * 5, axes), inputs, arrays, target=PACKED_ATTENTION)
    loops = "sinks" in arrays
    target = f"{PACKED_ATTENTION}_backward"
    check(gradients_of(options), ([0] * 5, axes), inputs, arrays, target=target, loops=loops)
    inner = jax.vmap(gradients_of(options), ([0] * 5, axes))
    twice = [np.stack([inputs[0], inputs[0][::-1]]), *inputs[1:]]
    around = [0, *[None] * 4], dict.fromkeys(arrays)
    check(inner, around, twice, arrays, target=target, loops=loops)


def test_packed_sequences_with_mapped_sinks_are_looped_over() -> None:
    case = VarlenCase("sinks", (3, 4), arrays=("sinks",))
    arrays, options = split_keywords(case.attributes())
    arrays["sinks"] = np.stack([arrays["sinks"], 2 * arrays["sinks"]])
    operands = [*case.inputs()], arrays
    axes = ([None] * 5, {"sinks": 0})
    check(packed_of(options), axes, *operands, target=PACKED_ATTENTION, loops=True)


def test_a_batch_of_derivatives() -> None:
    """jax.jacrev asks for those of one call."""
    inputs = VarlenCase("jacobian", (5, 3)).inputs()
    attend = partial(jax_frontend.varlen_attention, scale=0.25)

    def gradients(dout: Any, inputs: Any) -> Any:
        return jax.vjp(lambda *x: attend(*x, *inputs[3:]), *inputs[:3])[1](dout)

    douts = np.random.default_rng(3).normal(size=(4, *inputs.query.shape)).astype(np.float32)
    axes = (0, [None] * 5)
    check(gradients, axes, douts, [*inputs], target=f"{PACKED_ATTENTION}_backward")


PACKED_FAULTS: dict[str, dict[str, Any]] = {
    "order": {"query_start_loc": [0, 5, 4, 7]},
    "first": {"query_start_loc": [-1, 5, 5, 7]},
    "end": {"query_start_loc": [0, 5, 7, 90]},
    "count": {"num_seqs": [4]},
    "negative count": {"num_seqs": [-1]},
    "prefix": {"prefix_seqs": [-1, 1, 0]},
    "negative prefix": {"prefix_seqs": [-1, -2, 0]},
    "large prefix": {"prefix_seqs": [-1, 2**31 - 1, 0]},
    "both": {"query_start_loc": [0, 2, 7, 6], "prefix_seqs": [-1, 2, 0]},
}


def between_sound_packed_calls(fault: str, padding: int = 0) -> dict[str, np.ndarray]:
    """The operands of three calls; the second breaks a rule."""
    case = VarlenCase("faults", (5, 0, 2), padding=padding)
    sound = dict(zip(packed.ARRAYS, case.inputs(), strict=True))
    if "prefix_seqs" in PACKED_FAULTS[fault]:
        sound["prefix_seqs"] = np.zeros(len(sound["query_start_loc"]) - 1, np.int32)
        sound["prefix_seqs"][0] = -1
    operands = {name: np.stack([x] * 3) for name, x in sound.items()}
    for name, wrong in PACKED_FAULTS[fault].items():
        operands[name][1].flat[: len(wrong)] = wrong
    return operands


@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_faulty_packed_sequences_are_an_error(fault: str) -> None:
    attend = partial(jax_frontend.varlen_attention, scale=0.5)
    operands = between_sound_packed_calls(fault)
    rule = (
        r"prefix_seqs\[4\] must"
        if "prefix_seqs" in PACKED_FAULTS[fault]
        else r".*query_start_loc\[11\]=-1 "
    )
    with pytest.raises(JAX_ERRORS, match=f"INVALID_ARGUMENT: varlen_attention: {rule}"):
        jax.block_until_ready(jax.vmap(lambda x: attend(**x))(operands))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_faulty_packed_sequences_on_cuda_affect_one_call(
    fault: str, padding: int, gpu: Gpu
) -> None:
    """The faulty call has the same rows as alone, some of them NaN. The other calls are right."""
    operands = between_sound_packed_calls(fault, padding)
    operands["num_seqs"] = operands["num_seqs"].reshape(3, 1)
    forward = partial(packed.attend, gpu)
    outputs, lse = one_call_of(forward, operands)
    dout = np.random.default_rng(5).normal(size=outputs.shape).astype(np.float32)
    of_output = {"output": outputs, "lse": lse, "dout": dout}

    def backward(arrays: dict[str, Any]) -> tuple[np.ndarray, ...]:
        output, lse, dout = (arrays.pop(name) for name in of_output)
        return (*packed.differentiate(gpu, arrays, dout, (output, lse)).values(),)

    for function, arrays in ((forward, operands), (backward, operands | of_output)):
        found = one_call_of(function, arrays)
        for i in range(3):
            alone = function({name: x[i] for name, x in arrays.items()} | {"scale": 0.5})
            for of_all, of_one in zip(found, alone, strict=True):
                assert_same_bits(of_all[i], of_one)


def one_call_of(function: Callable[..., Any], operands: dict[str, Any]) -> list[np.ndarray]:
    """The results of a handler for the calls under jax.vmap."""
    mapped = {name: Operand(jnp.asarray(x), True) for name, x in operands.items()}
    batched = packed_calls.batch(3, mapped, {})
    assert batched is not None
    arrays = {name: np.asarray(x) for name, x in batched.arrays.items()}
    results = function(arrays | {"num_seqs": arrays["num_seqs"].reshape(1), "scale": 0.5})
    return [np.asarray(x) for x in batched.unbatch([*map(jnp.asarray, results)])]


def test_simple_add() -> None:
    a, b = split(add())[0]
    many = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    check(jax_frontend.simple_add, (0, None), many, b, target="XlaGpuSimpleAdd")
    check(jax_frontend.simple_add, (None, 1), a, many.swapaxes(0, 1), target="XlaGpuSimpleAdd")
    twice = jax.vmap(jax_frontend.simple_add, (0, None))
    check(twice, (None, 0), many, np.stack([b, b * 2]), target="XlaGpuSimpleAdd")


def test_numbers_too_large_for_32_bits_are_looped_over() -> None:
    def is_folded(function: Any, num_tokens: int, *shapes: tuple[int, ...], ints: int) -> bool:
        dtypes = [jnp.float32] * (len(shapes) - ints) + [jnp.int32] * ints
        structs = map(jax.ShapeDtypeStruct, shapes, dtypes)
        jaxpr = str(jax.make_jaxpr(jax.vmap(function))(*structs))
        return f"f32[{shapes[0][0] * num_tokens},1,1] = " in jaxpr

    attend = partial(jax_frontend.paged_attention, scale=1.0)
    for size, is_small in ((3, True), (4, False)):
        keys, slots, metadata = (size, 9, 1, 1), (size, 9), [(size, 3), (size, 3, 2), (size, 4)]
        arrays = (size, 2**28, 2, 2, 1), keys, keys, slots
        assert is_folded(jax_frontend.kv_cache_update, 9, *arrays, ints=1) == is_small
        arrays = keys, (size, 2**29, 1, 2, 1), *metadata, (size,)
        assert is_folded(attend, 9, *arrays, ints=4) == is_small
        arrays = (size, 2**29, 1, 1), (size, 8, 2, 2, 1), *metadata, (size,)
        assert is_folded(attend, 2**29, *arrays, ints=4) == is_small


def test_differentiation_is_refused() -> None:
    query, *rest = split(attention())[0]
    attend = partial(jax_frontend.paged_attention, scale=0.5)
    many = jax.vmap(attend, (0, *[None] * 5))
    with pytest.raises(NotImplementedError, match="^paged_attention: inference only"):
        jax.grad(lambda query: many(query, *rest).sum())(query[None])


BAD_CALLS = [call for call in DYNAMIC if call.values[0].arguments.keys() >= {"kv_cache"}]
SOUND = {"paged_attention": attention, "kv_cache_update": update}


def between_sound_calls(bad: BadCall) -> tuple[list[Any], dict[str, Any]]:
    """The operands of three calls; the second breaks a rule."""
    operands, options = split(bad.arguments)
    sound, _ = split(SOUND[bad.op]())
    stacked = []
    for ours, theirs in zip(operands, sound, strict=True):
        other = theirs.reshape(ours.shape) if theirs.size == ours.size else ours
        stacked.append(np.stack([other, ours, other]))
    return stacked, options


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_a_bad_call_is_an_error(bad: BadCall) -> None:
    operands, options = between_sound_calls(bad)
    function = jax.vmap(partial(getattr(jax_frontend, bad.op), **options))
    with pytest.raises(JAX_ERRORS, match=f"INVALID_ARGUMENT: {bad.op}: "):
        jax.block_until_ready(function(*operands))


@pytest.mark.parametrize(
    "bad", [call for call in BAD_CALLS if call.values[0].op == "paged_attention"]
)
def test_a_bad_call_on_cuda_affects_one_call(bad: BadCall, gpu: Gpu) -> None:
    """The faulty call has the same rows as alone, some of them NaN. The other calls are right."""
    operands, options = between_sound_calls(bad)
    shared, options = split_keywords(options | {"return_lse": True})
    names = [*inspect.signature(jax_frontend.paged_attention).parameters][: len(operands)]
    mapped = {name: Operand(jnp.asarray(x), True) for name, x in zip(names, operands, strict=True)}
    unmapped = {name: Operand(jnp.asarray(x), False) for name, x in shared.items()}
    batched = vmapped.batch(3, mapped | unmapped, {"kv_layout": None, "value_head_size": None})
    arrays = {name: np.asarray(x) for name, x in batched.arrays.items()}
    inputs = [arrays.pop(name) for name in names]
    results = attend_on(gpu, inputs, **arrays, **options, **batched.options)
    unfolded = [np.asarray(x) for x in batched.unbatch([*map(jnp.asarray, results)])]
    for i in range(3):
        alone = attend_on(gpu, [x[i] for x in operands], **shared, **options)
        assert_same_bits(tuple(x[i] for x in unfolded), alone)


def test_random_calls_with_and_without_errors() -> None:
    """All calls use one program, so that there is time for many."""
    attend = partial(jax_frontend.paged_attention, scale=0.5, return_lse=True)
    alone, folded = jax.jit(attend), jax.jit(jax.vmap(attend))
    outcomes = {True: 0, False: 0}
    for seed in range(300):
        rng = np.random.default_rng(seed)
        calls = [random_call(rng, is_bad=rng.random() < 0.2) for _ in range(3)]
        try:
            expected = [jax.tree.map(np.asarray, alone(*call)) for call in calls]
        except JAX_ERRORS:
            expected = []
        outcomes[bool(expected)] += 1
        stacked = [np.stack(each) for each in zip(*calls, strict=True)]
        if expected:
            results = jax.tree.map(np.asarray, folded(*stacked))
            assert_same_bits(results, tuple(map(np.stack, zip(*expected, strict=True))))
        else:
            with pytest.raises(JAX_ERRORS, match="INVALID_ARGUMENT: paged_attention: "):
                jax.block_until_ready(folded(*stacked))
    assert min(outcomes.values()) > 50


def random_call(rng: np.random.Generator, is_bad: bool) -> list[Any]:
    num_tokens, places, width, block_size, num_blocks = 12, 4, 3, 2, 5
    num_seqs = int(rng.integers(0, places + 1))
    starts = rng.choice(JUNK, places + 1)
    starts[: num_seqs + 1] = np.sort(rng.integers(0, num_tokens + 1, num_seqs + 1))
    lengths, tables = rng.choice(JUNK, places), rng.choice(JUNK, (places, width))
    for s, (start, end) in enumerate(pairwise(starts[: num_seqs + 1])):
        starts[s + 1] = end = min(end, start + width * block_size)
        lengths[s] = rng.integers(end - start, width * block_size + 1)
        tables[s] = rng.integers(0, num_blocks, width)
    count = np.int32(num_seqs)
    if is_bad:
        spoiled = [lengths, tables, starts, np.array([count])][rng.integers(4)]
        spoiled.flat[rng.integers(spoiled.size)] = rng.choice([-1, 5, 6, 7, 13, *JUNK])
        count = spoiled[0] if spoiled.size == 1 else count
    query = rng.standard_normal((num_tokens, 2, 4), np.float32)
    kv_cache = rng.standard_normal((num_blocks, block_size, 2, 4), np.float32)
    return [query, kv_cache, lengths, tables, starts, np.asarray(count, np.int32)]
