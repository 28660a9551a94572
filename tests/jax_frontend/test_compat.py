"""jax_frontend.compat: calls with the arguments of other libraries agree with the oracle."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_frontend
from harness import reference
from harness.arrays import CACHE_DTYPES, DTYPES
from harness.compare import assert_close_on_cpu, assert_same_bits
from jax_frontend.compat import (
    ejkernel,
    pallas_gpu,
    pallas_tpu,
    sglang_jax,
    tpu_inference,
    vllm_jax,
)
from tests.cases.bad_calls import assert_says
from tests.support.backends import JAX_ERRORS
from tests.support.tpu_calls import KV_LENS, MAX_SEQS, PAGE_SIZE, inputs, oracle

ROOT = Path(__file__).parents[2]
F32, I32 = np.float32, np.int32


@pytest.fixture(autouse=True)
def _no_rank_promotion() -> Iterator[None]:
    """Programs may forbid arrays of different ranks in one operation, as JAX's own tests do."""
    with jax.numpy_rank_promotion("raise"):
        yield


def as_jax(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def check(actual: Any, call: dict[str, Any], scale: float, factor: float, **options: Any) -> None:
    """Compares with the oracle's output, times `factor`, and with its cache."""
    expected, cache = oracle(call, is_one_row=False, scale=scale, **options)
    output, updated = actual
    assert_same_bits(np.asarray(updated), cache.astype(updated.dtype))
    assert output.dtype == call["queries"].dtype
    tolerance = 0.02 if output.dtype.itemsize == 2 else 1e-5
    np.testing.assert_allclose(
        np.asarray(output, np.float64), factor * expected, rtol=tolerance, atol=tolerance
    )


def test_tpu_inference() -> None:
    """Their oracle tests are in tests/backends/test_ragged_paged_attention.py."""
    assert tpu_inference.ragged_paged_attention is jax_frontend.ragged_paged_attention_v3
    assert tpu_inference.ragged_paged_attention_hd64 is jax_frontend.ragged_paged_attention_hd64
    assert tpu_inference.ragged_paged_attention_v2 is jax_frontend.ragged_paged_attention
    assert pallas_tpu.ragged_paged_attention is jax_frontend.ragged_paged_attention
    assert vllm_jax is tpu_inference


PAGE = 32


def runs_of_rows() -> tuple[np.ndarray, ...]:
    """Whole pages, parts of pages and single rows; two columns of slices are padding."""
    rng = np.random.default_rng(0)
    lengths = np.array([7, PAGE, PAGE, 1, 1, 9, 99, 5])
    places = np.array([2 * PAGE - 7, 2 * PAGE, 4 * PAGE, 5 * PAGE + 6, 0, 7 * PAGE + 3, 0, 0])
    slices = np.stack([places, np.cumsum(lengths) - lengths, lengths]).astype(I32)
    new_kv, kv_cache = (rng.standard_normal((n, 8, 16)).astype(F32) for n in (100, 8 * PAGE))
    return new_kv, slices, kv_cache, np.array([6], I32)


@pytest.mark.parametrize("spec", [None, P(None, "heads")], ids=["one", "divided"])
@pytest.mark.parametrize("is_checked", [False, True])
def test_tpu_inference_kv_cache_update(spec: Any, is_checked: bool) -> None:
    new_kv, slices, kv_cache, num_slices = runs_of_rows()
    expected = kv_cache.copy()
    for place, first, length in slices[:, : num_slices[0]].T:
        expected[place : place + length] = new_kv[first : first + length]
    mesh = None if spec is None else Mesh(np.array(jax.devices()[:4]), "heads")
    updated = tpu_inference.kv_cache_update(
        *map(jnp.asarray, (new_kv, slices, kv_cache, num_slices)),
        page_size=PAGE,
        mesh=mesh,
        kv_cache_pspec=spec,
        dynamic_validate_inputs=is_checked,
    )
    assert_same_bits(np.asarray(updated), expected)


@pytest.mark.parametrize(
    ("row", "run", "value", "rule"),
    [
        (0, 0, -1, "lie in the 256 rows of kv_cache"),
        (0, 3, 256, "lie in the 256 rows of kv_cache"),
        (0, 0, PAGE - 1, "lie in one page of 32 rows"),
        (0, 4, 5 * PAGE + 6, "name rows of the cache that no other slice names"),
        (1, 0, -1, "lie in the 100 rows of new_kv"),
        (1, 5, 99, "lie in the 100 rows of new_kv"),
        (1, 1, 8, "begin at row 7 of new_kv, where the last ends"),
        (2, 2, 0, "have 1 to page_size=32 rows"),
        (2, 2, PAGE + 1, "have 1 to page_size=32 rows"),
    ],
)
def test_tpu_inference_kv_cache_update_refuses_wrong_runs(
    row: int, run: int, value: int, rule: str
) -> None:
    new_kv, slices, kv_cache, num_slices = runs_of_rows()
    slices[row, run] = value
    with pytest.raises(ValueError, match=rf"slices\[:, {run}\] must {rule}; got \["):
        tpu_inference.kv_cache_update(
            *map(jnp.asarray, (new_kv, slices, kv_cache, num_slices)),
            page_size=PAGE,
            dynamic_validate_inputs=True,
        )


@pytest.mark.parametrize(
    ("row", "value"), [(0, -5), (1, -(2**31)), (2, -1)], ids=["place", "first", "length"]
)
def test_a_run_that_no_cache_has_writes_nothing(row: int, value: int) -> None:
    """No sum of its numbers names a row. The run is the first one, and nobody checks it."""
    new_kv, slices, kv_cache, _ = runs_of_rows()
    slices[row, 0] = value
    updated = tpu_inference.kv_cache_update(
        *map(jnp.asarray, (new_kv, slices, kv_cache, np.array([1], I32))),
        page_size=PAGE,
        dynamic_validate_inputs=False,
    )
    assert_same_bits(np.asarray(updated), kv_cache)


def test_tpu_inference_kv_cache_update_refuses_wrong_arguments() -> None:
    arrays = [*map(jnp.asarray, runs_of_rows())]
    for place, name, array in (
        (1, "slices", jnp.zeros((2, 3), I32)),
        (3, "num_slices", jnp.int32(1)),
    ):
        wrong = [*arrays[:place], array, *arrays[place + 1 :]]
        with pytest.raises(ValueError, match=rf"kv_cache_update: {name} must have shape \["):
            tpu_inference.kv_cache_update(*wrong)
    mesh = Mesh(np.array(jax.devices()), "heads")
    with pytest.raises(ValueError, match="kv_cache_pspec must be given with mesh; got None"):
        tpu_inference.kv_cache_update(*arrays, mesh=mesh)
    with pytest.raises(JAX_ERRORS, match="slot"):
        wrong = arrays[1].at[0, 0].set(8 * PAGE)
        jax.block_until_ready(tpu_inference.kv_cache_update(arrays[0], wrong, arrays[2], arrays[3]))


# The arguments of `inputs`.
CALLS: dict[str, tuple[Any, ...]] = {
    "float32": ("float32", 8, 2, 128, (4, 1, 128)),
    "one head of 64": ("bfloat16", 5, 1, 64, (1, 2, 128)),
    "a padded head_dim": ("float32", 6, 3, 80, (6, 1, 128)),
    "8 bits": ("bfloat16", 6, 2, 128, (1, 4, 128), "float8_e4m3fn"),
}
SINKS = np.random.default_rng(1).standard_normal(8).astype(F32)


def packed(call: dict[str, Any]) -> dict[str, Any]:
    """The call with the arguments of sglang-jax: each sequence has only the pages that it needs."""
    tables = call["page_indices"].reshape(MAX_SEQS, -1)
    counts = -(-np.array(KV_LENS) // PAGE_SIZE)
    pages = [tables[s, :count] for s, count in enumerate(counts)]
    cu_kv_lens = np.cumsum([0, *counts * PAGE_SIZE, *[0] * (MAX_SEQS - len(counts))])
    changes = {
        "kv_cache_fused": call["kv_cache"],
        "page_indices": np.concatenate([*pages, np.zeros(3, I32)]),
        "cu_kv_lens": cu_kv_lens.astype(I32),
    }
    return {name: x for name, x in (call | changes).items() if name != "kv_cache"}


@pytest.mark.parametrize(
    ("options", "our_options"),
    [
        ({}, {}),
        ({"sliding_window": 6, "soft_cap": 3.0}, {"sliding_window": 6, "soft_cap": 3.0}),
        ({"causal": 0, "mask_aligned_to_cu_kv": True}, {"causal": False}),
        ({"causal": 0, "sliding_window": 4}, {"causal": False, "sliding_window": 4}),
        ({"k_scale": 0.5, "v_scale": 2.0, "q_scale": 0.25}, {}),
        ({"attention_sink": 0.5}, {"sinks": np.full(8, 0.5)}),
        ({"attention_sink": SINKS}, {"sinks": SINKS}),
        ({"softmax_dtype": jnp.float32, "max_pages_per_seq": 4}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CALLS)
def test_sglang_jax(name: str, options: dict[str, Any], our_options: dict[str, Any]) -> None:
    call = inputs(*CALLS[name])
    num_heads = call["queries"].shape[1]
    if "sinks" in our_options:
        our_options = {"sinks": our_options["sinks"][:num_heads]}
    if isinstance(options.get("attention_sink"), np.ndarray):
        options = {"attention_sink": jnp.asarray(SINKS[:num_heads])}
    arrays = as_jax(packed(call))
    attend = jax.jit(
        lambda arrays: sglang_jax.ragged_paged_attention(
            **arrays, custom_mask=None, sm_scale=0.2, debug_mode=False, **options
        )
    )
    scale = 0.2 * options.get("k_scale", 1.0)
    check(attend(arrays), call, scale, options.get("v_scale", 1.0), **our_options)


def test_sglang_jax_positional_arguments() -> None:
    call = packed(inputs(*CALLS["float32"]))
    order = "queries keys values kv_cache_fused kv_lens page_indices cu_q_lens cu_kv_lens"
    arrays = [jnp.asarray(call[name]) for name in [*order.split(), "distribution"]]
    result = sglang_jax.ragged_paged_attention(*arrays, None, jnp.asarray(SINKS))
    call["attention_sink"] = SINKS
    expected = sglang_jax.ragged_paged_attention(**as_jax(call))
    assert_same_bits(jax.tree.map(np.asarray, result), jax.tree.map(np.asarray, expected))


def test_sglang_jax_reports_pages_past_the_end() -> None:
    call = packed(inputs(*CALLS["float32"]))
    call["page_indices"] = call["page_indices"][:-4]  # the padding and a page of the last sequence
    with pytest.raises(JAX_ERRORS, match=r"block_tables\[3, 1\] must be from 0 to"):
        jax.block_until_ready(sglang_jax.ragged_paged_attention(**as_jax(call)))


def test_sglang_jax_reports_pages_before_the_first() -> None:
    """In JAX, place -1 is the last one, a page of another sequence."""
    call = packed(inputs(*CALLS["float32"]))
    call["cu_kv_lens"][1] = -PAGE_SIZE
    with pytest.raises(JAX_ERRORS, match=r"block_tables\[1, 0\] must be from 0 to"):
        jax.block_until_ready(sglang_jax.ragged_paged_attention(**as_jax(call)))


def renamed(call: dict[str, Any]) -> dict[str, Any]:
    """The call with the arguments of ejKernel."""
    names = {"page_indices": "block_tables", "cu_q_lens": "query_start_loc"}
    return {names.get(name, name): x for name, x in call.items()}


@pytest.mark.parametrize(
    ("options", "our_options"),
    [
        ({}, {}),
        ({"sliding_window": 6, "logits_soft_cap": 3.0}, {"sliding_window": 6, "soft_cap": 3.0}),
        ({"k_scale": 0.5, "v_scale": 2.0, "q_scale": 0.25}, {}),
        ({"softmax_aux": SINKS}, {"sinks": SINKS}),
        ({"platform": "auto", "num_queries_per_block": 8}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CALLS)
def test_ejkernel_v3(name: str, options: dict[str, Any], our_options: dict[str, Any]) -> None:
    call = inputs(*CALLS[name])
    if "sinks" in our_options:
        sinks = SINKS[: call["queries"].shape[1]]
        options, our_options = {"softmax_aux": jnp.asarray(sinks)}, {"sinks": sinks}
    arrays = as_jax(renamed(call))
    attend = jax.jit(
        lambda arrays: ejkernel.ragged_page_attention_v3(**arrays, softmax_scale=0.2, **options)
    )
    scale = 0.2 * options.get("k_scale", 1.0)
    check(attend(arrays), call, scale, options.get("v_scale", 1.0), **our_options)


def test_ejkernel_v3_positional_arguments_and_default_scales() -> None:
    call = inputs(*CALLS["float32"])
    for options, scale in (({}, 1.0), ({"softmax_scale": None}, 128**-0.5)):
        arrays = [jnp.asarray(x) for x in (*call.values(), SINKS)]
        result = ejkernel.ragged_page_attention_v3(*arrays, **options)
        check(result, call, scale, 1.0, sinks=SINKS)


def test_ejkernel_v3_on_a_mesh() -> None:
    call = inputs(*CALLS["float32"])
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    heads, cache, rest = P(None, "tp"), P(None, None, "tp"), P()
    result = ejkernel.ragged_page_attention_v3(
        *(jnp.asarray(x) for x in call.values()),
        jnp.asarray(SINKS),
        softmax_scale=0.2,
        mesh=mesh,
        in_specs=(heads, heads, heads, cache, rest, rest, rest, rest, P("tp")),
        out_specs=(heads, cache),
    )
    check(result, call, 0.2, 1.0, sinks=SINKS)


class Unified(NamedTuple):
    """A call of attention alone, with K and V in two arrays."""

    dtype: str = "float32"
    num_heads: int = 6
    num_kv_heads: int = 3
    head_size: int = 64

    def arrays(self) -> dict[str, Any]:
        rng = np.random.default_rng(2)
        dtype = DTYPES[self.dtype]
        lens = [(1, 17), (0, 0), (5, 30), (1, 1), (12, 12)]
        tables = rng.permutation(40)[: 5 * 4].reshape(5, 4).astype(I32)
        counts = -(-np.array([kv_len for _, kv_len in lens]) // 8)
        tables[np.arange(4) >= counts[:, None]] = -1
        caches = rng.standard_normal((2, 40, 8, self.num_kv_heads, self.head_size), F32)
        queries = rng.standard_normal((21, self.num_heads, self.head_size), F32)
        return {
            "queries": queries.astype(dtype),
            "key_cache": caches[0].astype(dtype),
            "value_cache": caches[1].astype(dtype),
            "kv_lens": np.array([kv_len for _, kv_len in lens], I32),
            "block_tables": tables,
            "query_start_loc": np.cumsum([0, *(q_len for q_len, _ in lens)], dtype=I32),
        }


@pytest.mark.parametrize(
    ("options", "our_options"),
    [
        ({}, {}),
        ({"softmax_scale": 0.3}, {"scale": 0.3}),
        ({"sliding_window": 6, "logits_soft_cap": 3.0}, {"sliding_window": 6, "soft_cap": 3.0}),
        ({"sliding_window": 0, "logits_soft_cap": 0.0, "num_warps": 4}, {}),
        ({"softmax_aux": SINKS[:6]}, {"sinks": SINKS[:6]}),
        ({"alibi_slopes": SINKS[:6]}, {"alibi_slopes": SINKS[:6]}),
        (
            {"alibi_slopes": SINKS[:6], "sliding_window": 6},
            {"alibi_slopes": SINKS[:6], "sliding_window": 6},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ejkernel_unified(dtype: str, options: dict[str, Any], our_options: dict[str, Any]) -> None:
    arrays = Unified(dtype).arrays()
    options = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, options)
    result = jax.jit(lambda arrays: ejkernel.unified_attention(**arrays, **options))(arrays)
    inputs = [arrays[name] for name in ("queries", "key_cache", "kv_lens", "block_tables")]
    inputs += [arrays["query_start_loc"], np.int32(5)]
    attributes = {"scale": 64**-0.5, "value_cache": arrays["value_cache"], "kv_layout": "nbhd"}
    assert_close_on_cpu(np.asarray(result), inputs, attributes | our_options)


def test_ejkernel_adds_alibi_from_the_first_query_on() -> None:
    """ejKernel's formula and ours give the same softmax."""
    arrays = Unified(num_heads=1, num_kv_heads=1).arrays()
    slope = F32(0.3)
    result = ejkernel.unified_attention(
        **as_jax(arrays), alibi_slopes=jnp.array([slope]), softmax_scale=0.5
    )
    s, q_len, kv_len = 2, 5, 30  # the third sequence
    context_len = kv_len - q_len
    pages = arrays["block_tables"][s, :4]
    keys, values = (
        arrays[name][pages].reshape(-1, 64)[:kv_len].astype(np.float64)
        for name in ("key_cache", "value_cache")
    )
    first = arrays["query_start_loc"][s]
    for i in range(q_len):
        logits = 0.5 * keys @ arrays["queries"][first + i, 0]
        logits += slope * (np.arange(kv_len) - context_len)
        logits = logits[: context_len + i + 1]
        weights = np.exp(logits - logits.max())
        expected = weights @ values[: len(weights)] / weights.sum()
        np.testing.assert_allclose(np.asarray(result)[first + i, 0], expected, atol=1e-5)


def test_ejkernel_unified_on_a_mesh() -> None:
    arrays = Unified(num_heads=8, num_kv_heads=4).arrays()
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    heads, caches = P(None, "tp"), P(None, None, "tp")
    expected = ejkernel.unified_attention(**as_jax(arrays), softmax_aux=jnp.asarray(SINKS))
    result = ejkernel.unified_attention(
        **as_jax(arrays),
        softmax_aux=jnp.asarray(SINKS),
        mesh=mesh,
        in_specs=(heads, caches, caches, P(), P(), P(), P(), P(), P("tp")),
        out_specs=heads,
    )
    assert_same_bits(np.asarray(result), np.asarray(expected))


# The dimension of heads.
HEADS = {"queries": 1, "keys": 1, "values": 1, "kv_cache": 2, "kv_cache_fused": 2}


def sharded(mesh: Mesh, arrays: dict[str, Any], *scales: Any) -> Any:
    """tpu-inference's function on a mesh, called as MaxText calls it."""
    arrays = {"attention_sink": None} | arrays
    names = ("queries", "keys", "values", "kv_cache", "kv_lens", "page_indices", "cu_q_lens")
    operands = [arrays[name] for name in (*names, "distribution", "attention_sink")]
    return tpu_inference.sharded_ragged_paged_attention(mesh, *operands, *scales)


@pytest.mark.parametrize(
    ("function", "change", "head_size", "is_divided"),
    [
        pytest.param(tpu_inference.ragged_paged_attention, dict, 64, False, id="v3"),
        pytest.param(tpu_inference.ragged_paged_attention_hd64, dict, 64, False, id="hd64"),
        pytest.param(sglang_jax.ragged_paged_attention, packed, 64, False, id="sglang-jax"),
        pytest.param(tpu_inference.ragged_paged_attention, dict, 128, True, id="sharded"),
        pytest.param(tpu_inference.ragged_paged_attention_hd64, dict, 64, True, id="sharded-64"),
    ],
)
def test_the_meshes_of_serving_stacks(
    function: Any, change: Any, head_size: int, is_divided: bool
) -> None:
    """Under shard_map, sequences are divided along one axis and heads along another. Each device's
    results have the bits of a call on its part, and XLA sends nothing. `is_divided`: the function
    on the mesh does so itself."""
    call = change(inputs("bfloat16", 5, 1, head_size, (1, 2, 128)))
    rng = np.random.default_rng(4)

    def part() -> dict[str, np.ndarray]:
        arrays = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in call.items()}
        return {name: arrays[name] if name in HEADS else x for name, x in call.items()}

    parts = [[part() for _ in range(4)] for _ in range(2)]

    def joined(name: str) -> np.ndarray:
        if name not in HEADS:
            return np.concatenate([row[0][name] for row in parts])
        rows = [np.concatenate([part[name] for part in row], HEADS[name]) for row in parts]
        return np.concatenate(rows)

    specs = {1: P("data", "model"), 2: P("data", None, "model"), None: P("data")}
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    attend = jax.jit(
        (lambda arrays: sharded(mesh, arrays, 0.2))
        if is_divided
        else jax.shard_map(
            lambda arrays: function(**arrays, sm_scale=0.2),
            mesh=mesh,
            in_specs=({name: specs[HEADS.get(name)] for name in call},),
            out_specs=(specs[1], specs[2]),
            check_vma=False,
        )
    )
    arrays = {name: jnp.asarray(joined(name)) for name in call}
    program = attend.lower(arrays).compile().as_text()
    assert not re.search("all-(gather|reduce|to-all)|collective", program)
    results = [np.asarray(x) for x in attend(arrays)]
    for data, model in np.ndindex(2, 4):
        expected = function(**as_jax(parts[data][model]), sm_scale=0.2)
        for result, dim, expected_part in zip(results, (1, 2), expected, strict=True):
            row = np.split(result, 2)[data]
            assert_same_bits(np.split(row, 4, dim)[model], np.asarray(expected_part))


@pytest.mark.parametrize("axes", [("data", "model"), ("attn_dp", "expert")], ids=str)
def test_sharded_ragged_paged_attention(axes: tuple[str, str]) -> None:
    """All options, sinks, and kv heads that are fewer than the devices that share the heads."""
    call = inputs("float32", 8, 2, 128, (8, 1, 128))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), axes)
    call["attention_sink"] = SINKS
    options = (0.2, 6, None, 0.5, 2.0, False, False, 3.0)
    result = sharded(mesh, as_jax(call), *options)
    keys, values = (np.repeat(call[name], 2, 1) for name in ("keys", "values"))
    expected = tpu_inference.ragged_paged_attention(
        **as_jax(call | {"keys": keys, "values": values}),
        sm_scale=0.2,
        sliding_window=6,
        k_scale=0.5,
        v_scale=2.0,
        update_kv_cache=False,
        use_causal_mask=False,
        soft_cap=3.0,
    )
    assert_same_bits(np.asarray(result[0]), np.asarray(expected[0]))
    assert_same_bits(np.asarray(result[1]), call["kv_cache"])
    updated = sharded(mesh, as_jax(call), 0.2)
    check(updated, call | {"keys": keys, "values": values}, 0.2, 1, sinks=SINKS)
    three = {name: call[name][:, [0, 0, 1]] for name in ("keys", "values")}
    message = "k's num_kv_heads must divide or be a multiple of the 4 devices that share the heads"
    with pytest.raises(ValueError, match=rf"^{SHARDED}: {message}; got 3\. "):
        sharded(mesh, as_jax(call | three), 0.2)


SHARDED = "tpu_inference.sharded_ragged_paged_attention"
LENGTHS = [0, 3, 32, 0, 17, 1]


def decode_inputs(dtype: str, cache_dtype: str) -> tuple[list[Any], np.ndarray, list[Any]]:
    """The operands of paged_attention, V, and the scales of K and V, with heads first."""
    rng = np.random.default_rng(3)
    batch_size = len(LENGTHS)
    pages = rng.standard_normal((2, 3, 30, 8, 32), F32)
    tables = rng.permutation(30)[: batch_size * 4].reshape(batch_size, 4).astype(I32)
    all_dtypes = DTYPES | CACHE_DTYPES
    if cache_dtype == "int8":
        pages *= 30
    k_pages, v_pages = pages.astype(all_dtypes[cache_dtype])
    scales = [*rng.uniform(0.01, 0.05, (2, 3, 30, 8)).astype(F32)]
    query = rng.standard_normal((batch_size, 6, 32), F32).astype(DTYPES[dtype])
    start = np.arange(batch_size + 1, dtype=I32)
    operands = [query, k_pages, np.array(LENGTHS, I32), tables, start, np.int32(batch_size)]
    return operands, v_pages, scales


CACHES = [*((dtype, dtype) for dtype in DTYPES), *(("bfloat16", dtype) for dtype in CACHE_DTYPES)]


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES)
def test_pallas_gpu(dtype: str, cache_dtype: str, soft_cap: float | None) -> None:
    operands, v_pages, scales = decode_inputs(dtype, cache_dtype)
    query, k_pages, lengths, tables, *_ = map(jnp.asarray, operands)
    given = scales if cache_dtype in CACHE_DTYPES else []
    result = pallas_gpu.paged_attention(
        *(query, k_pages, jnp.asarray(v_pages), tables, lengths, *map(jnp.asarray, given)),
        attn_logits_soft_cap=soft_cap,
        block_h=32,
    )
    attributes = {"scale": 1.0, "soft_cap": soft_cap, "value_cache": v_pages, "kv_layout": "hnbd"}
    for name, scale in zip(("k_scale", "v_scale"), given, strict=False):
        attributes[name] = np.moveaxis(scale, 0, -1)
    assert_close_on_cpu(np.asarray(result), operands, attributes | {"causal": False})


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [case for case in CACHES if "float8" not in case[1]]
)
def test_pallas_tpu(dtype: str, cache_dtype: str, soft_cap: float | None) -> None:
    operands, v_pages, scales = decode_inputs(dtype, cache_dtype)
    query, k_pages, lengths, tables, *_ = map(jnp.asarray, operands)
    pages: list[Any] = [k_pages, jnp.asarray(v_pages)]
    attributes = {"scale": 1.0, "soft_cap": soft_cap, "value_cache": v_pages, "kv_layout": "hnbd"}
    if cache_dtype == "int8":
        pages = [
            QuantizedTensor(x, jnp.asarray(127.5 * scale)[..., None])
            for x, scale in zip(pages, scales, strict=True)
        ]
        attributes |= {"k_scale": np.moveaxis(scales[0], 0, -1)}
        attributes |= {"v_scale": np.moveaxis(scales[1], 0, -1)}
    attend = jax.jit(
        lambda *arrays: pallas_tpu.paged_attention(
            *arrays, attn_logits_soft_cap=soft_cap, pages_per_compute_block=2
        )
    )
    result = attend(query, *pages, lengths, tables)
    assert_close_on_cpu(np.asarray(result), operands, attributes | {"causal": False})


class QuantizedTensor(NamedTuple):
    """As in jax.experimental.pallas.ops.tpu.paged_attention.quantization_utils."""

    weight: Any
    scales: Any


def test_inactive_slots_do_not_affect_others() -> None:
    operands, v_pages, _ = decode_inputs("bfloat16", "bfloat16")
    query, k_pages, lengths, tables, *_ = operands
    active = lengths > 0
    arrays = [jnp.asarray(x) for x in (query, k_pages, v_pages, lengths, tables)]
    result = np.asarray(pallas_tpu.paged_attention(*arrays))
    assert not result[~active].any()
    start = jnp.arange(active.sum() + 1, dtype=jnp.int32)
    expected = jax_frontend.paged_attention(
        *(jnp.asarray(x) for x in (query[active], k_pages, lengths[active], tables[active])),
        *(start, start[-1], 1.0),
        value_cache=jnp.asarray(v_pages),
        kv_layout="hnbd",
    )
    assert_same_bits(result[active], np.asarray(expected))


def test_pallas_gpu_without_lengths() -> None:
    operands, v_pages, _ = decode_inputs("float32", "float32")
    query, k_pages, lengths, tables, *_ = map(jnp.asarray, operands)
    arrays = (query, k_pages, jnp.asarray(v_pages), tables)
    result = pallas_gpu.paged_attention(*arrays, None)
    expected = pallas_gpu.paged_attention(*arrays, jnp.full_like(lengths, 4 * 8))
    assert_same_bits(np.asarray(result), np.asarray(expected))


def pallas_arrays(tables: str) -> dict[str, Any]:
    operands, v_pages, _ = decode_inputs("bfloat16", "int8")
    names = ("q", "k_pages", "lengths", tables)
    return as_jax(dict(zip(names, operands, strict=False)) | {"v_pages": v_pages})


SGLANG = "sglang_jax.ragged_paged_attention"
RAGGED = "ejkernel.ragged_page_attention_v3"
UNIFIED = "ejkernel.unified_attention"
PALLAS_TPU, PALLAS_GPU = "pallas_tpu.paged_attention", "pallas_gpu.paged_attention"
SOUND: dict[str, tuple[Any, Any]] = {
    SGLANG: (
        sglang_jax.ragged_paged_attention,
        lambda: as_jax(packed(inputs(*CALLS["float32"]))),
    ),
    RAGGED: (
        ejkernel.ragged_page_attention_v3,
        lambda: as_jax(renamed(inputs(*CALLS["float32"]))),
    ),
    UNIFIED: (ejkernel.unified_attention, lambda: as_jax(Unified().arrays())),
    PALLAS_TPU: (pallas_tpu.paged_attention, lambda: pallas_arrays("page_indices")),
    PALLAS_GPU: (pallas_gpu.paged_attention, lambda: pallas_arrays("block_tables")),
}
"""Functions, and the arguments of a sound call."""


def refused(op: str, message: str, call: str | None = None, **changes: Any) -> Any:
    """Arguments that a function refuses, and the error. `call`: the function, if not `op`."""
    name = call or op.partition(" ")[0]
    return pytest.param(name, changes, f"{op}: {message}", id=f"{name}-{'-'.join(changes)}")


def ints(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


NOT_SUPPORTED = "must be None, as it is not supported; got "
MASK_VALUE = (
    "mask_value must be None or at most -10000, as masked positions have no weight here; got "
)
REFUSED = [
    refused(SGLANG, f"custom_mask {NOT_SUPPORTED}shape [9]", custom_mask=jnp.ones(9)),
    refused(SGLANG, f"xai_temperature_len {NOT_SUPPORTED}1024.0", xai_temperature_len=1024.0),
    refused(SGLANG, f"softmax_dtype {NOT_SUPPORTED}'bfloat16'", softmax_dtype=jnp.bfloat16),
    refused(SGLANG, "causal must be 0 or 1; got 2", causal=2),
    refused(SGLANG, f"{MASK_VALUE}-1.0", mask_value=-1.0),
    refused(SGLANG, "distribution must have shape [3]; got [2]", distribution=ints(2)),
    refused(SGLANG, "cu_kv_lens must have shape [7]; got [6]", cu_kv_lens=ints(6)),
    refused(
        SGLANG,
        "page_indices must have shape [num_page_indices], of at least one page; got [6, 2]",
        page_indices=ints(6, 2),
    ),
    refused(
        SGLANG,
        "kv_cache_fused must have shape [num_pages, page_size, rows // packing, packing, width]; got [40, 8, 4, 128]",
        kv_cache_fused=jnp.zeros((40, 8, 4, 128)),
    ),
    refused(SGLANG, "attention_sink must have shape [8]; got [7]", attention_sink=jnp.zeros(7)),
    refused(RAGGED, "platform must be None or 'auto'; got 'triton'", platform="triton"),
    refused(RAGGED, "distribution must have shape [3]; got [2]", distribution=ints(2)),
    refused(RAGGED, "softmax_aux must have shape [8]; got [7]", softmax_aux=jnp.zeros(7)),
    refused(
        RAGGED,
        "block_tables must have shape [max_seqs=6 * pages_per_seq], of at least one page; got [6, 5]",
        block_tables=ints(6, 5),
    ),
    refused(
        RAGGED,
        "in_specs must be given with mesh; got None",
        mesh=Mesh(np.array(jax.devices()[:2]), ("tp",)),
    ),
    refused(
        RAGGED,
        "mesh must be given with in_specs and out_specs; got None",
        in_specs=P(),
        out_specs=P(),
    ),
    refused(UNIFIED, f"qq_bias {NOT_SUPPORTED}shape [4, 4]", qq_bias=jnp.zeros((4, 4))),
    refused(UNIFIED, "causal must be True; got False", causal=False),
    refused(UNIFIED, "platform must be None or 'auto'; got 'xla'", platform="xla"),
    refused(
        f"{UNIFIED} with alibi_slopes",
        f"softmax_aux {NOT_SUPPORTED}shape [6]",
        alibi_slopes=jnp.zeros(6),
        softmax_aux=jnp.zeros(6),
    ),
    refused(
        f"{UNIFIED} with alibi_slopes",
        f"logits_soft_cap {NOT_SUPPORTED}2.0",
        alibi_slopes=jnp.zeros(6),
        logits_soft_cap=2.0,
    ),
    refused(
        UNIFIED,
        "kv_lens must have shape [num_seqs]; got [5, 1]",
        kv_lens=ints(5, 1),
    ),
    refused(
        PALLAS_TPU,
        "lengths must have shape [batch_size=6]; got [1]",
        lengths=ints(1),
    ),
    refused(
        PALLAS_TPU,
        ("q must have shape [batch_size, num_q_heads, head_dim]; got [6, 1, 6, 32]"),
        q=jnp.zeros((6, 1, 6, 32)),
    ),
    refused(
        PALLAS_TPU,
        ("k_pages.scales must have shape [3, 30, 8, 1]; got [3, 30, 8, 32]"),
        k_pages=QuantizedTensor(*[jnp.zeros((3, 30, 8, 32), jnp.int8)] * 2),
    ),
    refused(
        "paged_attention",
        "value_cache must have kv_cache's dtype int8, or uint8; got bfloat16",
        call=PALLAS_TPU,
        v_pages=jnp.zeros((3, 30, 8, 32), jnp.bfloat16),
    ),
    refused(PALLAS_TPU, f"{MASK_VALUE}0.0", mask_value=0.0),
    refused(PALLAS_GPU, f"{MASK_VALUE}nan", mask_value=np.nan),
    refused(
        PALLAS_GPU, "v_scales_pages must have shape [3, 30, 8]; got [3]", v_scales_pages=jnp.ones(3)
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_refuses(name: str, changes: dict[str, Any], message: str) -> None:
    function, arguments = SOUND[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        function(**arguments() | changes)
    assert_says(str(raised.value), message)


FUNCTIONS: list[tuple[Any, str]] = [
    (jax_frontend.ragged_paged_attention_v3, "ragged_paged_attention_v3"),
    (jax_frontend.ragged_paged_attention_hd64, "ragged_paged_attention_hd64"),
    (tpu_inference.kv_cache_update, "tpu_inference.kv_cache_update"),
    (tpu_inference.sharded_ragged_paged_attention, SHARDED),
    (sglang_jax.ragged_paged_attention, "sglang_jax.ragged_paged_attention"),
    (ejkernel.ragged_page_attention_v3, "ejkernel.ragged_page_attention_v3"),
    (ejkernel.unified_attention, "ejkernel.unified_attention"),
    (pallas_tpu.paged_attention, "pallas_tpu.paged_attention"),
    (pallas_gpu.paged_attention, "pallas_gpu.paged_attention"),
]


def required(function: Any) -> dict[str, str]:
    """The arguments that a call cannot do without, and their types."""
    parameters = inspect.signature(function).parameters.values()
    found = [x for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
    assert len(found) > 3
    return {x.name: str(x.annotation) for x in found}


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (None, r"be an array; got None\. It is not optional"),
        ([0], r"have type array; got list\. Pass jax\.numpy\.asarray"),
    ],
    ids=["None", "list"],
)
@pytest.mark.parametrize(("function", "op"), FUNCTIONS)
def test_no_array(function: Any, op: str, given: Any, rule: str) -> None:
    names = required(function)
    for name in [name for name, kind in names.items() if kind == "jax.Array"]:
        arrays = {each: given if each == name else jnp.ones((2, 2, 2)) for each in names}
        for call in (partial(function, **arrays), partial(function, *arrays.values())):
            with pytest.raises(TypeError, match=f"^{op}: {name} must {rule}"):
                call()


@pytest.mark.parametrize(("function", "op"), FUNCTIONS)
def test_integers_that_jax_would_truncate(function: Any, op: str) -> None:
    """Page 2**40 would become page 0, which may be another request's."""
    names = required(function)
    for name in [name for name, kind in names.items() if "jax.Array" in kind]:
        arrays = {
            each: np.full((2, 2, 2), 2**40 if each == name else 0, np.int64) for each in names
        }
        rule = f"{name} must hold integers that fit int32, as jax_enable_x64 is off; got {2**40}"
        with pytest.raises(ValueError, match=rf"^{op}: {rule}\. Correct it, or turn "):
            function(**arrays)


class Named(NamedTuple):
    """An array whose dimensions have names, as Levanter's functions take them."""

    array: jax.Array
    axes: tuple[str, ...]


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_the_function_for_levanter(soft_cap: float | None) -> None:
    """That of the page, called as Levanter calls its own: compiled, the scale traced, the sequences
    and pages that are not there named by a large number."""
    page = (ROOT / "docs/jax-serving.md").read_text()
    (recipe,) = re.findall(r"^    def ragged_paged_attention\(\n(?:(?:    .*)?\n)+", page, re.M)
    names: dict[str, Any] = {"jnp": jnp, "hax": SimpleNamespace(named=Named)}
    exec(textwrap.dedent(recipe), names)

    rng, none = np.random.default_rng(0), 2_000_000
    query = rng.standard_normal((12, 2, 3, 16)).astype(np.float32)
    pages = rng.standard_normal((9, 4, 2 * 2, 16)).astype(np.float32)
    lens = np.array([10, 7, none], np.int32)
    tables = np.array([[5, 2, 8], [7, 1, none], [none] * 3], np.int32)
    starts = np.array([0, 1, 8, 8], np.int32)

    @jax.jit
    def attend(scale: jax.Array, *arrays: jax.Array) -> jax.Array:
        q = Named(arrays[0], ("position", "kv_head", "q_heads_per_group", "head_size"))
        others = [Named(x, ()) for x in arrays[1:]]
        result: Named = names["ragged_paged_attention"](
            q, *others, jnp.array(2), sm_scale=scale, soft_cap=soft_cap
        )
        assert result.axes == q.axes
        return result.array

    result = attend(jnp.array(0.25), *map(jnp.asarray, (query, pages, lens, tables, starts)))
    rows = query.reshape(12, 6, 16)
    expected = reference.paged_attention(
        rows, pages, lens, tables, starts, 2, scale=0.25, soft_cap=soft_cap
    )
    np.testing.assert_allclose(np.asarray(result)[:8].reshape(8, 6, 16), expected[:8], atol=1e-5)
