"""Meshes with explicit axes: what devices cannot share is refused by its rule, not gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_frontend

METADATA = [np.int32(x) for x in ([45], [[7, 2, 9]], [0, 8], [1])]
QUERY, CACHE = np.ones((8, 16, 64), np.float32), np.ones((16, 16, 8, 64), np.float32)
NEW, SLOTS = np.ones((8, 4, 64), np.float32), np.arange(8)


def attend(query: P, cache: P, **options: Any) -> Any:
    arrays = (jax.device_put(QUERY, query), jax.device_put(CACHE, cache))
    return jax_frontend.paged_attention(*arrays, *METADATA, 0.125, **options)


def update(cache: P, key: P) -> Any:
    arrays = (jax.device_put(CACHE, cache), jax.device_put(NEW, key))
    return jax_frontend.kv_cache_update(*arrays, NEW, SLOTS)


def add(spec: P) -> Any:
    a = np.ones((8, 8), np.float32)
    return jax_frontend.simple_add(jax.device_put(a, spec), a)


def attend_many() -> Any:
    queries = jax.device_put(np.stack([QUERY] * 4), P("a"))
    return jax.vmap(lambda query: jax_frontend.paged_attention(query, CACHE, *METADATA, 0.125))(
        queries
    )


REMEDY = ". Pass it through jax.sharding.reshard, or call the op in jax.shard_map"
REFUSED = {
    "tokens": (
        partial(attend, P("b", "a"), P(None, None, "a")),
        f"paged_attention: query must be sharded along dimension 1 alone, its heads; got "
        f"PartitionSpec('b', 'a', None){REMEDY}",
    ),
    "blocks": (
        partial(attend, P(None, "a"), P("b", None, "a")),
        f"paged_attention: kv_cache must be sharded along dimension 2 alone, its heads; got "
        f"PartitionSpec('b', None, 'a', None){REMEDY}",
    ),
    "more devices than kv heads": (
        partial(attend, P(None, ("a", "b")), P(None, None, "a")),
        "paged_attention: query must be sharded over a number of devices that divides 4 heads; "
        f"got PartitionSpec(None, ('a', 'b'), None), which is 8 devices{REMEDY}",
    ),
    "two axes": (
        partial(attend, P(None, "b"), P(None, None, "a")),
        "paged_attention: kv_cache must be sharded along the mesh axes of the other operands' heads, "
        f"['b']; got PartitionSpec(None, None, 'a', None){REMEDY}",
    ),
    "a layout whose heads cannot be shared": (
        partial(attend, P(None, "a"), P(), kv_layout="nb(2h)d"),
        f"paged_attention: query must be replicated; got PartitionSpec(None, 'a', None){REMEDY}",
    ),
    "new rows of a replicated cache": (
        partial(update, P(), P(None, "a")),
        "kv_cache_update: kv_cache must be sharded along dimension 2 by ['a'], as other heads are"
        f"; got PartitionSpec(None, None, None, None){REMEDY}",
    ),
    "an op without heads": (
        partial(add, P("a")),
        f"simple_add: a must be replicated; got PartitionSpec('a', None){REMEDY}",
    ),
    "the mapped axis": (
        attend_many,
        "paged_attention: query must be replicated along the axis that jax.vmap maps over; got "
        "mesh axis 'a'. Use jax.shard_map there",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal(case: str) -> None:
    call, message = REFUSED[case]
    with on_mesh((4, 2)), pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message


def on_mesh(sizes: tuple[int, ...]) -> Any:
    names = ("a", "b", "c")[: len(sizes)]
    devices = jax.devices()[: np.prod(sizes)]
    return jax.set_mesh(
        jax.make_mesh(sizes, names, (AxisType.Explicit,) * len(sizes), devices=devices)
    )


ALLOWED: dict[str, tuple[Callable[[], Any], P]] = {
    "query and cache": (partial(attend, P(None, "a"), P(None, None, "a")), P(None, "a", None)),
    "the query alone": (partial(attend, P(None, "a"), P()), P(None, "a", None)),
    "the cache alone": (partial(attend, P(), P(None, None, "a")), P(None, "a", None)),
    "two axes for one dimension": (
        partial(attend, P(None, ("b", "c")), P(None, None, ("b", "c"))),
        P(None, ("b", "c"), None),
    ),
    "nothing": (partial(attend, P(), P()), P(None, None, None)),
    "the cache of an update": (partial(update, P(None, None, "a"), P()), P(None, None, "a", None)),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_type_of_the_result(case: str) -> None:
    call, spec = ALLOWED[case]
    with on_mesh((2, 2, 2)):
        assert jax.typeof(call()).sharding.spec == spec
