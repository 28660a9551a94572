"""Parity of the backends. For every case, JAX and torch_xla make the same custom call, every backend
gives the same bits, and they agree with the float64 oracle."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from harness import hlo, reference
from harness.compare import assert_close_on_cpu, assert_same_bits
from harness.hlo import ATTENTION, UPDATE
from shared_ffi.selftest.backends import BACKENDS, Backend
from tests.cases.all import CASES, SHORT_CASES, SHORT_UPDATE_CASES, UPDATE_CASES
from tests.cases.case import Case
from tests.cases.sound_calls import attention, split
from tests.cases.updates import UpdateCase
from tests.support import backends
from tests.support.calls import split_keywords


@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_paged_attention(case: Case, compiled: hlo.CompiledPrograms) -> None:
    inputs, attributes = case.inputs(), case.attributes()

    in_torch = backends.in_torch("paged_attention", *inputs, **attributes)
    assert_close_on_cpu(in_torch, inputs, attributes)

    arrays, options = split_keywords(attributes)
    jitted = backends.jitted("paged_attention", **options)
    assert_same_bits(jax.tree.map(np.asarray, jitted(*inputs, **arrays)), in_torch)
    if not backends.are_of_torch_xla(arrays):
        return
    assert_same_bits(backends.in_torch_xla("paged_attention", *inputs, **attributes), in_torch)
    assert_same_bits(backends.in_openxla("paged_attention", *inputs, **attributes), in_torch)

    before, after = hlo.from_jax(jitted, *inputs, **arrays)
    lazy_before = hlo.from_torch_xla(backends.lazily("paged_attention", *inputs, **attributes))
    (call,) = hlo.custom_calls(before, ATTENTION)
    assert hlo.custom_calls(lazy_before, ATTENTION) == [call]
    assert compiled.optimized(call, ATTENTION) == set(hlo.custom_calls(after, ATTENTION))


@pytest.mark.pairwise
@pytest.mark.parametrize("case", UPDATE_CASES, ids=lambda case: case.id)
def test_kv_cache_update(case: UpdateCase, compiled: hlo.CompiledPrograms) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    expected = reference.kv_cache_update(*inputs, **attributes)

    assert_same_bits(backends.in_torch("kv_cache_update", *inputs, **attributes), expected)
    arrays, options = split_keywords(attributes)
    jitted = backends.jitted("kv_cache_update", **options)
    assert_same_bits(jax.tree.map(np.asarray, jitted(*inputs, **arrays)), expected)
    if not backends.are_of_torch_xla(arrays):
        return
    assert_same_bits(backends.in_torch_xla("kv_cache_update", *inputs, **attributes), expected)
    assert_same_bits(backends.in_openxla("kv_cache_update", *inputs, **attributes), expected)

    if inputs.slot_mapping.dtype == "int64":
        return  # JAX's program has 32-bit slots, unless it is told otherwise
    before, after = hlo.from_jax(jitted, *inputs, **arrays)
    lazy_before = hlo.from_torch_xla(backends.lazily("kv_cache_update", *inputs, **attributes))
    (call,) = hlo.custom_calls(before, UPDATE)
    assert hlo.custom_calls(lazy_before, UPDATE) == [call]
    assert compiled.optimized(call, UPDATE) == set(hlo.custom_calls(after, UPDATE))


@pytest.mark.parametrize(
    ("op", "case"),
    [
        *(("paged_attention", case) for case in SHORT_CASES),
        *(("kv_cache_update", case) for case in SHORT_UPDATE_CASES),
    ],
    ids=lambda value: getattr(value, "id", value),
)
def test_inductor(op: str, case: Case | UpdateCase) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    expected = backends.in_torch(op, *inputs, **attributes)
    assert_same_bits(backends.in_inductor(op, *inputs, **attributes), expected)


FLOAT4_CASES: list[tuple[str, Case | UpdateCase]] = [
    *(("paged_attention", x) for x in CASES if x.attributes().get("codes") == "e2m1"),
    *(("kv_cache_update", x) for x in UPDATE_CASES if x.attributes().get("codes") == "e2m1"),
]


@pytest.mark.parametrize(("op", "case"), FLOAT4_CASES, ids=lambda x: getattr(x, "id", x))
def test_float4(op: str, case: Case | UpdateCase) -> None:
    """Caches of the frameworks' own dtypes of 4 bits have the bits of uint8 with codes."""
    inputs, attributes = case.inputs(), case.attributes()
    expected = backends.in_torch(op, *inputs, **attributes)
    del attributes["codes"]
    assert_same_bits(backends.in_torch_of_float4(op, *inputs, **attributes), expected)
    assert_same_bits(backends.in_jax_of_float4(op, *inputs, **attributes), expected)


@pytest.mark.parametrize(
    ("op", "case"),
    [
        next(x for x in FLOAT4_CASES if x[0] == op and (x[1].value_cache_dtype is None) == is_one)
        for op in ("paged_attention", "kv_cache_update")
        for is_one in (True, False)
    ],
    ids=lambda x: getattr(x, "id", x),
)
def test_inductor_with_float4(op: str, case: Case | UpdateCase) -> None:
    inputs, attributes = case.inputs(), case.attributes()
    expected = backends.in_torch(op, *inputs, **attributes)
    del attributes["codes"]
    assert_same_bits(backends.in_inductor_of_float4(op, *inputs, **attributes), expected)


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_blocks_and_heads_in_several_dimensions(backend: str) -> None:
    """Blocks, or heads, are numbered with the last dimension fastest."""
    case = Case(id="several", sequences=((5, 14), (1, 9)), padding_blocks=0, block_size=2)
    query, kv_cache, *metadata = case.inputs()
    assert len(kv_cache) == 15
    several = kv_cache.reshape(5, 3, *kv_cache.shape[1:])
    attend = backends.partial(backends.BACKENDS[backend], "paged_attention", **case.attributes())
    expected = attend(query, kv_cache, *metadata)
    assert_same_bits(attend(query, several, *metadata, kv_layout="nnb(h2)d"), expected)
    for packing in (1, 2, 4):  # K and V rows of 2 heads
        packed = kv_cache.reshape(15, 2, 4 // packing, packing, -1)
        assert_same_bits(attend(query, packed, *metadata, kv_layout="nb(h2)(h2)d"), expected)

    update_case = UpdateCase(id="several")
    kv_cache, *rest = update_case.inputs()
    several = kv_cache.reshape(2, 3, 1, *kv_cache.shape[1:])
    updated = backends.BACKENDS[backend]("kv_cache_update", several, *rest, kv_layout="nnnb(h2)d")
    expected = reference.kv_cache_update(kv_cache, *rest)
    assert_same_bits(updated, expected.reshape(several.shape))


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_simple_add(backend: str) -> None:
    a = backends.np.arange(6, dtype="float32").reshape(2, 3)
    assert_same_bits(
        backends.BACKENDS[backend]("simple_add", a, a * 10), reference.simple_add(a, a * 10)
    )


@pytest.mark.parametrize(
    "backend",
    [backend for backend in BACKENDS if backend.platform == "cpu"],
    ids=lambda backend: backend.name,
)
def test_the_smoke_step_works(backend: Backend) -> None:
    """What ``python -m shared_ffi`` runs in a process for each backend, here without one."""
    exec(backend.script, {})


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_slopes_may_be_negative(backend: str) -> None:
    """A later position then weighs less than an earlier one."""
    cache = np.random.default_rng(0).standard_normal((4, 2, 4, 8)).astype(np.float32)
    slopes = np.array([-0.5, 0.25, -1, -(2.0**96)], np.float32)
    operands, attributes = split(attention(kv_cache=cache, alibi_slopes=slopes))
    expected = reference.paged_attention(*operands, **attributes)
    result = backends.BACKENDS[backend]("paged_attention", *operands, **attributes)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
