"""The ops in JAX: transformations, donation, export, 64-bit mode."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
from harness import hlo, reference
from harness.compare import assert_same_bits
from tests.cases.sound_calls import DECODE_TABLE, add, attention, decode_steps, split, update
from tests.support.backends import JAX_ERRORS

OPERANDS, _ = split(attention())
attend = partial(jax_frontend.paged_attention, scale=0.5)


def random_operands(seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    query, kv_cache, *metadata = OPERANDS
    query = rng.standard_normal(query.shape, dtype=np.float32)
    kv_cache = rng.standard_normal(kv_cache.shape, dtype=np.float32)
    return [query, kv_cache, *metadata]


@pytest.mark.parametrize(
    "batched",
    range(6),
    ids=["query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs"],
)
def test_vmap_of_one_argument(batched: int) -> None:
    operands = random_operands()
    if batched < 2:
        versions = [operands[batched], operands[batched] * 2]
    else:
        other = {2: [4, 1, 0], 3: [[0, 2], [1, 3], [9, 9]], 4: [0, 1, 2, 7], 5: 1}[batched]
        versions = [operands[batched], np.array(other, np.int32)]
    in_axes = [0 if i == batched else None for i in range(6)]
    stacked = [np.stack(versions) if i == batched else x for i, x in enumerate(operands)]
    result = jax.jit(jax.vmap(attend, in_axes))(*stacked)
    for i, version in enumerate(versions):
        one = [version if j == batched else x for j, x in enumerate(operands)]
        assert_same_bits(np.asarray(result[i]), np.asarray(attend(*one)))


def test_a_layout_without_blocks() -> None:
    """Blocks of one position: the rows of the cache are slots."""
    rows = np.random.default_rng(0).standard_normal((8, 4, 8), np.float32)
    query, _, lens, _, *rest = random_operands()
    tables = np.int32([[3, 1, 6], [0, 9, 9], [9, 9, 9]])
    by_slots = attend(query, rows, lens, tables, *rest, kv_layout="n(h2)d")
    assert_same_bits(
        np.asarray(by_slots), np.asarray(attend(query, rows[:, None], lens, tables, *rest))
    )


def test_a_call_without_features_lowers_as_in_the_first_version() -> None:
    """Programs serialized by earlier versions run. Only the partitioner reads what was added."""
    before, _ = hlo.from_jax(partial(attend, sliding_window=9), *OPERANDS)
    (call,) = hlo.custom_calls(before, "xla_gpu_paged_attention")
    call = re.sub(r'frontend_attributes=\{xla.sdy.sharding_rule="[^"]*"\}, ', "", call)
    assert re.sub(r'arguments = "[^"]*", ', "", call) == (
        'f32[4,4,8]{2,1,0} custom-call(6 operands), custom_call_target="xla_gpu_paged_attention", '
        "operand_layout_constraints={f32[4,4,8]{2,1,0}, f32[4,2,4,8]{3,2,1,0}, s32[3]{0}, "
        "s32[3,2]{1,0}, s32[4]{0}, s32[]}, api_version=API_VERSION_TYPED_FFI, "
        "backend_config={scale = 5.000000e-01 : f32, sliding_window = 9 : i64, "
        "soft_cap = 0.000000e+00 : f32}"
    )


def test_donated_cache_is_updated_in_place() -> None:
    kv_cache, *rest = map(jnp.asarray, split(update())[0])
    address = kv_cache.unsafe_buffer_pointer()
    step = jax.jit(jax_frontend.kv_cache_update, donate_argnums=0)
    optimized = step.lower(kv_cache, *rest).compile().as_text()
    assert "input_output_alias={ {}: (0, {}, may-alias) }" in optimized
    assert " copy(" not in optimized
    for _ in range(3):
        kv_cache = step(kv_cache, *rest)
        assert kv_cache.unsafe_buffer_pointer() == address


def test_a_cache_that_is_not_donated_keeps_its_values() -> None:
    kv_cache, *rest = map(jnp.asarray, split(update())[0])
    updated = jax.jit(jax_frontend.kv_cache_update)(kv_cache, *rest)
    assert not kv_cache.any() and updated.any()


@pytest.mark.parametrize("x64", [False, True])
def test_same_program_and_bits_with_64_bit_types(x64: bool) -> None:
    operands = random_operands()
    with jax.enable_x64(x64):
        (call,) = hlo.custom_calls(hlo.from_jax(attend, *operands)[0], "xla_gpu_paged_attention")
        result = np.asarray(attend(*operands))
    assert (
        "scale = 5.000000e-01 : f32, sliding_window = 0 : i64, soft_cap = 0.000000e+00 : f32}"
        in call
    )
    assert_same_bits(result, np.asarray(attend(*operands)))


@pytest.mark.parametrize("slot", [2**31, 2**40, -(2**31) - 1])
def test_integers_that_jax_would_truncate(slot: int) -> None:
    """Slot 2**40 would become slot 0, which may be another request's."""
    operands, _ = split(update(slot_mapping=np.array([3, slot, -1], np.int64)))
    message = (
        "^kv_cache_update: slot_mapping must hold integers that fit int32, as jax_enable_x64 is "
        rf"off; got {slot}\. Correct it, or turn jax_enable_x64 on"
    )
    with pytest.raises(ValueError, match=message):
        jax_frontend.kv_cache_update(*operands)
    operands[3][1] = 2**31 - 1
    with pytest.raises(JAX_ERRORS, match="slot_mapping"):
        jax_frontend.kv_cache_update(*operands)


class OfNumPy:
    """An array of another library."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._array, dtype)


@pytest.mark.parametrize("convert", [torch.from_numpy, OfNumPy, lambda array: [*array]])
def test_integers_of_other_libraries_that_jax_would_truncate(convert: Any) -> None:
    (*others, _), _ = split(update())
    for slots, is_refused in (([3, 2**40, -1], True), ([3, 2, -1], False)):
        given = convert(np.array(slots, np.int64))
        if is_refused:
            message = "^kv_cache_update: slot_mapping must hold integers that fit int32"
            with pytest.raises(ValueError, match=message):
                jax_frontend.kv_cache_update(*others, given)
        else:
            jax_frontend.kv_cache_update(*others, given)


def test_int64_slots_with_64_bit_types() -> None:
    operands, _ = split(update(slot_mapping=np.array([0, 7, -1], np.int64)))
    with jax.enable_x64(True):
        (call,) = hlo.custom_calls(
            hlo.from_jax(jax_frontend.kv_cache_update, *operands)[0], "xla_gpu_kv_cache_update"
        )
        result = np.asarray(jax_frontend.kv_cache_update(*operands))
    assert "s64[3]{0}}" in call
    assert_same_bits(result, reference.kv_cache_update(*operands))


@pytest.mark.parametrize("transform", [jax.grad, partial(jax.jacfwd)], ids=["grad", "jacfwd"])
def test_differentiation_is_refused(transform: Any) -> None:
    query, *rest = random_operands()
    with pytest.raises(NotImplementedError, match="^paged_attention: inference only"):
        transform(lambda query: attend(query, *rest).sum())(query)
    a, b = split(add())[0]
    with pytest.raises(NotImplementedError, match="^simple_add: inference only"):
        transform(lambda a: jax_frontend.simple_add(a, b).sum())(a)
    cache, key, value, slots = split(update())[0]
    with pytest.raises(NotImplementedError, match="^kv_cache_update: inference only"):
        transform(lambda key: jax_frontend.kv_cache_update(cache, key, value, slots).sum())(key)


def test_gradients_flow_around_a_stopped_call() -> None:
    query, *rest = random_operands()
    loss = lambda query: (query * attend(jax.lax.stop_gradient(query), *rest)).sum()
    assert_same_bits(np.asarray(jax.grad(loss)(query)), np.asarray(attend(query, *rest)))


def test_shapes_without_running() -> None:
    operands = random_operands()
    result = jax.eval_shape(attend, *operands)
    assert (result.shape, result.dtype) == (operands[0].shape, np.float32)
    assert "xla_gpu[call=paged_attention(scale=0.5)]" in str(jax.make_jaxpr(attend)(*operands))


def test_decode_loop_compiles_once() -> None:
    @partial(jax.jit, donate_argnums=0)
    def step(cache: Any, token: Any, slot: Any, length: Any, tables: Any, num_seqs: Any) -> Any:
        cache = jax_frontend.kv_cache_update(cache, token[:, :2], token[:, :2] * 2, slot)
        start = jnp.array([0, 1], jnp.int32)
        return cache, jax_frontend.paged_attention(
            token, cache, length, tables, start, num_seqs, 0.5, soft_cap=30.0
        )

    cache = jnp.zeros((16, 16, 4, 8), jnp.float32)
    for token, slot, length, num_seqs in decode_steps():
        cache, _ = step(cache, token, slot, length, DECODE_TABLE, num_seqs)
    assert step._cache_size() == 1
