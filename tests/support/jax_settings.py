"""The settings that people use JAX in, and the ops in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
from jax_frontend.compat import ejkernel, pallas_gpu, pallas_tpu, sglang_jax, tpu_inference

Function = Callable[..., tuple[jax.Array, ...]]
"""A function of a kind's arrays."""

DEVICES = 4


@dataclass(frozen=True)
class Kind:
    """A call that devices share in one way."""

    name: str
    function: Function
    arrays: tuple[np.ndarray, ...]
    dims: tuple[int | None, ...]
    """The dimension of heads of each array; None: every device has all of it."""
    result_dims: tuple[int | None, ...]
    carried: tuple[tuple[int, int], ...]
    """Pairs (array, result) of one type: a loop carries them. An update writes them in place."""
    is_update: bool = False
    is_exact: bool = True
    """False: XLA chooses the order of sums."""
    adds_up: bool = False
    """Whether devices add up parts of a result, which JAX does where it knows what varies."""


def _kinds() -> Iterator[Kind]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def small(*shape: int) -> np.ndarray:
        return rng.integers(-100, 100, shape).astype(np.int8)

    query = normal(6, 16, 16)
    lens, tables = np.int32([9, 4, 0]), np.int32([[3, 9, 5], [7, 2, 2], [0, 0, 0]])
    metadata = (lens, tables, np.int32([0, 2, 5, 5]), np.int32([2]))
    replicated = (None,) * len(metadata)
    pool, scales = normal(12, 4, 8, 16), (normal(4) ** 2 + 1, normal(12, 4, 4) ** 2 + 1)
    one_array, two_arrays = (1, 2, *replicated), (1, 2, *replicated, 2)

    def attend(names: Sequence[str] = (), **options: Any) -> Function:
        def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            keywords = dict(zip(names, arrays[6:], strict=True))
            results = jax_frontend.paged_attention(*arrays[:6], 0.25, **keywords, **options)
            return results if isinstance(results, tuple) else (results,)

        return function

    def update(names: Sequence[str] = ()) -> Function:
        def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            keywords = dict(zip(names, arrays[4:], strict=True))
            results = jax_frontend.kv_cache_update(*arrays[:4], **keywords)
            return results if isinstance(results, tuple) else (results,)

        return function

    attention = partial(Kind, carried=((0, 0),), result_dims=(1,))
    yield attention("attention: GQA", attend(), (query, pool, *metadata), one_array)
    yield attention(
        "attention: one kv head",
        attend(),
        (query, normal(12, 4, 2, 16), *metadata),
        (1, None, *replicated),
    )
    yield attention(
        "attention: K and V in two arrays",
        attend(["value_cache"]),
        (query, normal(12, 4, 4, 16), *metadata, normal(12, 4, 4, 16)),
        two_arrays,
    )
    yield attention(
        "attention: scales of 8 bits",
        attend(["k_scale", "v_scale"]),
        (query, small(12, 4, 8, 16), *metadata, *scales),
        (*one_array, 0, 2),
    )
    yield attention(
        "attention: sinks, ALiBi, window, lse",
        attend(["sinks", "alibi_slopes"], sliding_window=5, soft_cap=30.0, return_lse=True),
        (query, pool, *metadata, normal(16), normal(16) ** 2),
        (*one_array, 0, 0),
        result_dims=(1, 1),
    )
    yield attention(
        "attention: draft tree",
        attend(["tree_mask"], max_query_len=64),
        (query, pool, *metadata, np.int32([[1, 0], [3, 0], [1, 0], [3, 0], [5, 0], [0, 0]])),
        (*one_array, None),
    )
    yield attention(
        "attention: ranges, causal by sequence",
        attend(["bidirectional_ranges", "causal"], sliding_window=2),
        (query, pool, *metadata, np.int32([[0, 2]] * len(query)), np.int32([0, 1, 0])),
        (*one_array, None, None),
    )
    yield attention(
        "attention: latent",
        attend(value_head_size=12),
        (query, normal(12, 4, 16), *metadata),
        (1, None, *replicated),
        carried=(),
    )
    yield attention(
        "attention: heads first in the pool, not causal",
        attend(kv_layout="hn2bd", causal=False, window_right=3),
        (query, normal(4, 12, 2, 4, 16), *metadata),
        (1, 0, *replicated),
    )
    yield from _training(normal)
    slots = np.int32([3, -1, 17, 40, 8])
    new = (normal(5, 4, 16), normal(5, 4, 16), slots)
    yield Kind("update", update(), (pool, *new), (2, 1, 1, None), (2,), ((0, 0),), is_update=True)
    yield Kind(
        "update: K and V in two arrays",
        update(["value_cache"]),
        (normal(12, 4, 4, 16), *new, normal(12, 4, 4, 16)),
        (2, 1, 1, None, 2),
        (2, 2),
        ((0, 0), (4, 1)),
        is_update=True,
    )
    yield Kind(
        "update: scales of 8 bits",
        update(["k_scale", "v_scale"]),
        (small(12, 4, 8, 16), *new, *scales),
        (2, 1, 1, None, 0, 2),
        (2,),
        ((0, 0),),
        is_update=True,
    )

    yield Kind(
        "update: scales that it makes",
        update(["k_scale_cache", "v_scale_cache"]),
        (small(12, 4, 8, 16), *new, normal(12, 4, 4), normal(12, 4, 4)),
        (2, 1, 1, None, 2, 2),
        (2, 2, 2),
        ((0, 0), (4, 1), (5, 2)),
        is_update=True,
    )

    def cache_first(function: Callable[..., Any], scale: str = "sm_scale") -> Function:
        def function_of_arrays(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            output, cache = function(*arrays, **{scale: 0.25})
            return cache, output

        return function_of_arrays

    def one(function: Callable[..., Any], **options: Any) -> Function:
        return lambda *arrays: (function(*arrays, **options),)

    rows = (normal(6, 4, 16), normal(6, 4, 16))
    packed = normal(12, 4, 4, 2, 16)
    flat, runs, distribution = tables.ravel(), metadata[2], np.int32([0, 0, 2])
    tpu = partial(Kind, result_dims=(2, 1), carried=((3, 0),), is_update=True)
    yield tpu(
        "ragged_paged_attention_v3",
        cache_first(jax_frontend.ragged_paged_attention_v3),
        (query, *rows, packed, lens, flat, runs, distribution),
        dims=(1, 1, 1, 2, *[None] * 4),
    )
    yield tpu(
        "ragged_paged_attention_hd64",
        cache_first(jax_frontend.ragged_paged_attention_hd64),
        (
            *(normal(6, heads, 64) for heads in (16, 4, 4)),
            *(normal(12, 4, 4, 1, 128), lens, flat, runs, distribution),
        ),
        dims=(1, 1, 1, 2, *[None] * 4),
    )
    yield tpu(
        "sglang_jax.ragged_paged_attention",
        cache_first(sglang_jax.ragged_paged_attention),
        (query, *rows, packed, lens, flat, runs, np.int32([0, 12, 16, 16]), distribution),
        dims=(1, 1, 1, 2, *[None] * 5),
    )
    yield tpu(
        "ejkernel.ragged_page_attention_v3",
        cache_first(ejkernel.ragged_page_attention_v3, "softmax_scale"),
        (query, *rows, packed, lens, flat, runs, distribution),
        dims=(1, 1, 1, 2, *[None] * 4),
    )
    yield attention(
        "ejkernel.unified_attention",
        one(ejkernel.unified_attention, softmax_scale=0.25),
        (query, normal(12, 4, 4, 16), normal(12, 4, 4, 16), lens, tables, runs),
        (1, 2, 2, None, None, None),
        is_exact=False,
    )
    yield attention(
        "ragged_paged_attention",
        one(jax_frontend.ragged_paged_attention, sm_scale=0.25),
        (query, pool, *metadata),
        one_array,
    )
    keys_and_values = (normal(4, 12, 4, 16), normal(4, 12, 4, 16))
    yield attention(
        "pallas_tpu.paged_attention",
        one(pallas_tpu.paged_attention, pages_per_compute_block=1),
        (query[:3], *keys_and_values, lens, tables),
        (1, 0, 0, None, None),
    )
    yield attention(
        "pallas_gpu.paged_attention",
        one(pallas_gpu.paged_attention),
        (query[:3], *keys_and_values, tables, lens),
        (1, 0, 0, None, None),
    )
    yield Kind(
        "tpu_inference.kv_cache_update",
        one(tpu_inference.kv_cache_update, page_size=4),
        (normal(6, 8, 16), np.int32([[9, 20], [0, 2], [2, 3]]), normal(48, 8, 16), np.int32([2])),
        (1, None, 1, None),
        (1,),
        ((2, 0),),
        is_update=True,
    )
    yield Kind(
        "merge_attention",
        jax_frontend.merge_attention,
        (normal(3, 6, 16, 16), normal(3, 6, 16)),
        (2, 2),
        (1, 1),
        (),
        is_exact=False,
    )
    yield Kind(
        "hadamard", lambda x: (jax_frontend.hadamard(x),), (normal(6, 4, 24),), (1,), (1,), ()
    )
    yield Kind(
        "simple_add",
        lambda a, b: (jax_frontend.simple_add(a, b),),
        (normal(6, 16), normal(6, 16)),
        (None, None),
        (None,),
        ((0, 0),),
    )


def _training(normal: Callable[..., np.ndarray]) -> Iterator[Kind]:
    """Attention of packed sequences, and its gradients."""
    batch = (np.int32([0, 2, 5, 5]), np.int32([2]))

    def attend(*arrays: jax.Array, **options: Any) -> jax.Array:
        names = ("sinks", "alibi_slopes", "prefix_seqs")
        more = dict(zip(names, arrays[5:], strict=True))
        return jax_frontend.varlen_attention(*arrays[:5], 0.25, **more, **options)

    def differentiate(*arrays: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        others = arrays[3:]
        output, pullback = jax.vjp(lambda *x: attend(*x, *others, **options), *arrays[:3])
        return pullback(output)

    for kv_heads in (4, 1):
        rows = (normal(6, 16, 16), normal(6, kv_heads, 16), normal(6, kv_heads, 16))
        dims = (1, *([None] if kv_heads == 1 else [1]) * 2)
        heads = "GQA" if kv_heads > 1 else "one kv head"
        prefix_seqs = np.int32([-1, 0, 9])
        arrays = (*rows, *batch, normal(16), normal(16) ** 2, prefix_seqs)
        of_batch = (None, None, 0, 0, None)
        yield Kind(
            f"training: {heads}, sinks, ALiBi, window, prefix",
            lambda *x: (attend(*x, sliding_window=3, soft_cap=30.0),),
            arrays,
            (*dims, *of_batch),
            (1,),
            ((0, 0),),
        )
        yield Kind(
            f"gradients: {heads}, sinks, ALiBi, window, prefix",
            partial(differentiate, sliding_window=3, soft_cap=30.0),
            arrays,
            (*dims, *of_batch),
            dims,
            ((0, 0),),
            is_exact=kv_heads > 1,
            adds_up=kv_heads == 1,
        )


KINDS = {kind.name: kind for kind in _kinds()}


def _again(kind: Kind, arrays: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The arrays of the next turn of a loop."""
    arrays = [*arrays]
    for array, result in kind.carried:
        arrays[array] = results[result]
    return arrays


def _twice(kind: Kind, function: Function) -> Function:
    return lambda *arrays: function(*_again(kind, arrays, function(*arrays)))


def _scan(kind: Kind, function: Function) -> Function:
    def scanned(*arrays: Any) -> Any:
        def turn(carried: Any, _: None) -> Any:
            results = function(*_with(kind, arrays, carried))
            return tuple(results[result] for _, result in kind.carried), results

        _, results = jax.lax.scan(turn, _carried(kind, arrays), None, length=2)
        return jax.tree.map(lambda x: x[1], results)

    return scanned


def _while(kind: Kind, function: Function) -> Function:
    def looped(*arrays: Any) -> Any:
        def turn(_: Any, carried: Any) -> Any:
            results = function(*_with(kind, arrays, carried))
            return tuple(results[result] for _, result in kind.carried)

        carried = jax.lax.fori_loop(0, 1, turn, _carried(kind, arrays))
        return function(*_with(kind, arrays, carried))

    return looped


def _carried(kind: Kind, arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jnp.asarray(arrays[array]) for array, _ in kind.carried)


def _with(kind: Kind, arrays: Sequence[Any], carried: Sequence[Any]) -> list[Any]:
    arrays = [*arrays]
    for (array, _), value in zip(kind.carried, carried, strict=True):
        arrays[array] = value
    return arrays


def _cond(kind: Kind, function: Function) -> Function:
    def branched(*arrays: Any) -> Any:
        zeros = lambda *arrays: jax.tree.map(lambda x: x * 0, function(*arrays))
        return jax.lax.cond(np.array(True), function, zeros, *arrays)

    return branched


def _vmap(kind: Kind, function: Function) -> Function:
    def mapped(first: Any, *others: Any) -> Any:
        in_axes = (0, *[None] * len(others))
        results = jax.vmap(function, in_axes)(jnp.stack([first, first]), *others)
        return jax.tree.map(lambda x: x[1], results)

    return mapped


@dataclass(frozen=True)
class Transformation:
    """How a program uses the op, and the function that has the same results."""

    apply: Callable[[Kind, Function], Function]
    expected: Callable[[Kind, Function], Function] = lambda kind, function: function
    is_jitted: bool = True


TRANSFORMATIONS = {
    "called directly": Transformation(lambda kind, function: function, is_jitted=False),
    "jit": Transformation(lambda kind, function: function),
    "scan": Transformation(_scan, _twice),
    "while": Transformation(_while, _twice),
    "cond": Transformation(_cond),
    "checkpoint": Transformation(lambda kind, function: jax.checkpoint(function)),
    "vmap": Transformation(_vmap),
}


@dataclass(frozen=True)
class Setting:
    """A mesh, and how programs meet it."""

    mesh: Callable[[], jax.sharding.Mesh | None]
    wrap: Callable[[Kind, Function], Function] = lambda kind, function: function
    axis: str | None = "model"
    """That heads are sharded along, outside of `wrap`; None: nothing is sharded."""
    sets_mesh: bool = False
    is_doubled: bool = False
    """Whether there are two calls. Along `data`, the first dimension of arrays and results has one
    after the other; arrays that begin with heads are the same for both."""

    def context(self, mesh: Any) -> AbstractContextManager[Any]:
        """The context in which programs are traced and run."""
        return jax.set_mesh(mesh) if self.sets_mesh else nullcontext()

    def place(self, kind: Kind, mesh: Any) -> list[jax.Array]:
        """The kind's arrays on the mesh's devices."""
        if mesh is None:
            return [jnp.asarray(x) for x in kind.arrays]
        placed = []
        for array, dim in zip(kind.arrays, kind.dims, strict=True):
            partition = spec(array, dim, self.axis)
            if self.is_doubled and dim != 0:
                array = np.concatenate([array, array])
                partition = P("data", *partition[1:])
            placed.append(jax.device_put(array, NamedSharding(mesh, partition)))
        return placed


def spec(array: Any, dim: int | None, axis: str | None) -> P:
    """The partition of an array along one dimension."""
    return P(*[axis if i == dim else None for i in range(np.ndim(array))])


def _mesh(axis_type: AxisType, shape: Sequence[int] = (DEVICES,), names: str = "model") -> Any:
    axes = (*names.split(),)
    return jax.make_mesh(
        (*shape,), axes, (axis_type,) * len(axes), devices=jax.devices()[: np.prod(shape)]
    )


def _shard_map(kind: Kind, function: Function, **options: Any) -> Function:
    in_specs = tuple(spec(x, dim, "model") for x, dim in zip(kind.arrays, kind.dims, strict=True))
    results = jax.eval_shape(function, *kind.arrays)
    out_specs = tuple(
        spec(x, dim, "model") for x, dim in zip(results, kind.result_dims, strict=True)
    )
    mesh = None if "axis_names" in options else _mesh(AxisType.Auto)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def _partly_manual(kind: Kind, function: Function) -> Function:
    """Two groups of devices, each with a call of its own: manual along `data` alone."""
    in_specs = tuple(P() if dim == 0 else P("data") for dim in kind.dims)
    return jax.shard_map(function, in_specs=in_specs, out_specs=P("data"), axis_names={"data"})


SETTINGS = {
    "one device": Setting(lambda: None),
    "Auto axes": Setting(lambda: _mesh(AxisType.Auto)),
    "Auto axes, set_mesh": Setting(lambda: _mesh(AxisType.Auto), sets_mesh=True),
    "Explicit axes": Setting(lambda: _mesh(AxisType.Explicit), sets_mesh=True),
    "shard_map": Setting(lambda: _mesh(AxisType.Auto), _shard_map),
    "shard_map, check_vma=False": Setting(
        lambda: _mesh(AxisType.Auto), partial(_shard_map, check_vma=False)
    ),
    "shard_map over data, Auto heads": Setting(
        lambda: _mesh(AxisType.Auto, (2, 2), "data model"),
        _partly_manual,
        sets_mesh=True,
        is_doubled=True,
    ),
    "shard_map over data, Explicit heads": Setting(
        lambda: _mesh(AxisType.Explicit, (2, 2), "data model"),
        _partly_manual,
        sets_mesh=True,
        is_doubled=True,
    ),
}


FLAGS: dict[str, dict[str, Any]] = {
    "jax_enable_x64": {"jax_enable_x64": True},
    "jax_debug_nans": {"jax_debug_nans": True},
    "jax_disable_jit": {"jax_disable_jit": True},
    "jax_enable_checks": {"jax_enable_checks": True},
    "jax_check_tracer_leaks": {"jax_check_tracer_leaks": True},
    "jax_numpy_rank_promotion=raise": {"jax_numpy_rank_promotion": "raise"},
    "jax_numpy_dtype_promotion=strict": {"jax_numpy_dtype_promotion": "strict"},
    "jax_transfer_guard=disallow": {"jax_transfer_guard": "disallow"},
    "jax_threefry_partitionable=False": {"jax_threefry_partitionable": False},
    "jax_use_shardy_partitioner=False": {"jax_use_shardy_partitioner": False},
    "jax_default_matmul_precision=highest": {"jax_default_matmul_precision": "highest"},
}


@contextmanager
def flags(values: dict[str, Any]) -> Iterator[None]:
    """JAX with these flags, and with the former ones afterwards."""
    former = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    jax.clear_caches()
    try:
        yield
    finally:
        for name, value in former.items():
            jax.config.update(name, value)
        jax.clear_caches()


FLAG_SETTINGS = ("one device", "Auto axes", "Explicit axes", "shard_map")
