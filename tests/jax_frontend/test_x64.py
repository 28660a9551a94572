"""Calls under ``jax_enable_x64``, where Python's numbers become arrays of 64 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_frontend
from harness.compare import assert_same_bits
from tests.support.tpu_calls import inputs

LENS, TABLES, STARTS, SCALE = [3, 45], [[5, 0, 0], [7, 2, 9]], [0, 1, 2], 0.125
QUERY = np.random.default_rng(0).standard_normal((2, 8, 64), np.float32)
CACHE = np.random.default_rng(1).standard_normal((16, 16, 4, 64), np.float32)
WANTED = np.asarray(
    jax_frontend.paged_attention(QUERY, CACHE, *map(np.int32, (LENS, TABLES, STARTS, 2)), SCALE)
)


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "metadata",
    [
        (LENS, TABLES, STARTS, 2),
        (*map(np.array, (LENS, TABLES, STARTS)), 2),
        (*map(np.array, (LENS, TABLES, STARTS)), np.int64(2)),
        (*map(np.int32, (LENS, TABLES, STARTS)), [2]),
    ],
    ids=["lists", "NumPy", "NumPy's int64", "int32"],
)
def test_metadata(metadata: Any) -> None:
    for convert in (lambda x: x, jnp.array):
        arrays = map(convert, metadata)
        assert_same_bits(
            np.asarray(jax_frontend.paged_attention(QUERY, CACHE, *arrays, SCALE)), WANTED
        )
    jitted = jax.jit(jax_frontend.paged_attention, static_argnames="scale")
    assert_same_bits(np.asarray(jitted(QUERY, CACHE, *metadata, scale=SCALE)), WANTED)


@pytest.mark.parametrize("length", [2**31, 2**40 + 3, -(2**40)])
def test_a_length_that_int32_cannot_hold_is_refused(length: int) -> None:
    """It does not become another sequence's length."""
    metadata = jnp.array([3, length]), jnp.array(TABLES), jnp.array(STARTS), jnp.array(2)
    nearest = 2**31 - 1 if length > 0 else -(2**31)
    message = (
        f"context_lens[1] must be from 0 to max_blocks_per_seq=3 * block_size=16; got {nearest}"
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=re.escape(message)):
        jax.block_until_ready(jax_frontend.paged_attention(QUERY, CACHE, *metadata, SCALE))


def test_features() -> None:
    """Scales, sinks and slopes of 64 bits are rounded; words of a tree mask are cut."""
    metadata = (*map(np.int32, (LENS, TABLES, STARTS)), 2)
    given: dict[str, Any] = {"sinks": [0.1] * 8, "alibi_slopes": [0.25] * 8}
    arrays = {name: np.float32(x) for name, x in given.items()}
    attend = jax_frontend.paged_attention
    for features in (given, {name: jnp.array(x) for name, x in given.items()}):
        assert_same_bits(
            np.asarray(attend(QUERY, CACHE, *metadata, SCALE, **features)),
            np.asarray(attend(QUERY, CACHE, *metadata, SCALE, **arrays)),
        )
    small = (CACHE * 10).astype(np.int8)
    assert_same_bits(
        np.asarray(attend(QUERY, small, *metadata, SCALE, k_scale=0.1, v_scale=jnp.array(0.1))),
        np.asarray(
            attend(QUERY, small, *metadata, SCALE, k_scale=np.float32(0.1), v_scale=np.float32(0.1))
        ),
    )
    words = np.array([[2**32 - 2**31 + 1, 0], [1, 0]])  # a bit of token 31, which nobody has
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"tree_mask\[0\]"):
        jax.block_until_ready(attend(QUERY, CACHE, *metadata, SCALE, tree_mask=words))


def test_slots() -> None:
    key = np.ones((3, 2, 64), np.float32)
    wanted = jax_frontend.kv_cache_update(CACHE, key, key, np.int32([5, -1, 17]))
    for slots in ([5, -1, 17], jnp.array([5, -1, 17])):
        assert_same_bits(
            np.asarray(jax_frontend.kv_cache_update(CACHE, key, key, slots)), np.asarray(wanted)
        )


@pytest.mark.parametrize("name", ["ragged_paged_attention_v3", "ragged_paged_attention_hd64"])
def test_functions_for_tpus(name: str) -> None:
    shape = (4, 1, 128) if name.endswith("v3") else (2, 1, 128)
    call = inputs("float32", 8, 2, 128 if name.endswith("v3") else 64, shape)
    function = getattr(jax_frontend, name)
    wanted = function(**{key: jnp.asarray(x) for key, x in call.items()})
    wide = {
        key: jnp.asarray(x.astype(np.int64) if x.dtype == np.int32 else x)
        for key, x in call.items()
    }
    for result, want in zip(function(**wide), wanted, strict=True):
        assert_same_bits(np.asarray(result), np.asarray(want))
