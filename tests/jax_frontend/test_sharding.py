"""Sharding over eight CPU devices of JAX and over two processes: the programs and their results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
from harness import hlo
from harness.compare import assert_same_bits
from harness.hlo import ATTENTION, COLLECTIVES, UPDATE
from tests.cases.case import Case, Groups
from tests.cases.updates import UpdateCase
from tests.cases.varlen import DIFFERENTIABLE, VarlenCase
from tests.support import scripts
from tests.support.calls import split_keywords

# The dimension of heads in the cache, by layout.
HEAD_DIMS = {None: 2, "2nbhd": 3, "n2hbd": 2, "nbh(2d)": 2, "nhbd": 1, "hnbd": 0}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Iterator[str]:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "shardy")
    jax.clear_caches()
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", before)
    jax.clear_caches()


def batch(**fields: Any) -> Case:
    sequences = ((1, 90), (5, 5), (0, 3), (7, 40))
    return Case(
        **({"id": "sharded", "sequences": sequences, "num_heads": 16, "num_kv_heads": 8} | fields)
    )


def along(mesh: Mesh, rank: int, dim: int | None, axis: str = "model") -> NamedSharding:
    return NamedSharding(mesh, P(*(axis if i == dim else None for i in range(rank))))


def shard_by_heads(mesh: Mesh, case: Case) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """The operands, keyword operands and options of a case, sharded by heads where they have
    any."""
    query, kv_cache, *metadata = case.inputs()
    arrays, options = split_keywords(case.attributes())
    is_shared = case.num_kv_heads > 1
    cache_sharding = along(mesh, kv_cache.ndim, HEAD_DIMS[case.kv_layout] if is_shared else None)
    operands = [put(query, along(mesh, 3, 1)), put(kv_cache, cache_sharding)]
    operands += [put(x, NamedSharding(mesh, P())) for x in metadata]
    whole = NamedSharding(mesh, P())
    others = {"value_cache": cache_sharding, "tree_mask": whole, "causal": whole}
    others |= {"bidirectional_ranges": whole, "k_global": whole, "v_global": whole}
    groups = [name for name, x in arrays.items() if name.endswith("scale") and x.ndim == 4]
    others |= dict.fromkeys(groups, along(mesh, 4, 2))
    if not is_shared:
        others |= {"k_scale": whole, "v_scale": whole}
    keywords = {
        name: put(x, others.get(name) or along(mesh, x.ndim, x.ndim - 1))
        for name, x in arrays.items()
    }
    return operands, keywords, options


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Like jax.device_put, but also for several processes and arrays with NaN."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "lse": {"return_lse": True},
    "sinks-and-alibi": {"sinks": True, "alibi_slopes": True, "sliding_window": 30},
    "trees": {"tree": "draft"},
    "masks": {"ranges": "any", "causal": False, "causal_seqs": True, "sliding_window": 9},
    "one-query-head-each": {"num_heads": 8},
    "one-kv-head": {"num_kv_heads": 1},
    "one-kv-head-scales": {"num_kv_heads": 1, "cache_dtype": "int8", "scales": "per head"},
    "latent": {"num_kv_heads": 1, "value_head_size": 12},
    "latent-heads": {"value_head_size": 12, "kv_layout": "hnbd"},
    "own-value-head-size": {"own_value_head_size": 12, "kv_layout": "nhbd"},
    "bf16": {"dtype": "bfloat16"},
    "one-scale": {"cache_dtype": "int8", "scales": "one"},
    "scales-per-head": {"cache_dtype": "float8_e4m3fn", "scales": "per head"},
    "scales-per-position": {"cache_dtype": "float8_e5m2", "scales": "per position"},
    "4-bits": {"cache_dtype": "int4", "scales": "per head"},
    "groups": {"cache_dtype": "e2m1", "groups": Groups(8, "float8_e8m0fnu", has_globals=True)},
    "8-and-4-bits": {
        "cache_dtype": "int8",
        "value_cache_dtype": "int4",
        "scales": "per position",
        "kv_layout": "nhbd",
    },
    **{f"layout-{layout}": {"kv_layout": layout} for layout in HEAD_DIMS if layout},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_sharding_by_heads_needs_no_communication(
    mesh: Mesh, partitioner: str, feature: str
) -> None:
    """In a plain jit, each device calls the handler on its own heads."""
    case = batch(**FEATURES[feature])
    operands, keywords, options = shard_by_heads(mesh, case)
    attend = jax.jit(partial(jax_frontend.paged_attention, **options))
    alone = attend(*case.inputs(), **split_keywords(case.attributes())[0])

    text = attend.lower(*operands, **keywords).compile().as_text()
    (call,) = hlo.custom_calls(text, ATTENTION)
    assert not COLLECTIVES.search(text)
    num_tokens, heads = case.inputs().query.shape[0], case.num_heads // 4
    columns = case.value_head_size or case.own_value_head_size or 16
    assert f"[{num_tokens},{heads},{columns}]" in call.partition("custom-call")[0]

    results = attend(*operands, **keywords)
    for result in jax.tree.leaves(results):
        assert result.sharding.spec[1] == "model"
    compare(results, alone)


@pytest.mark.parametrize("axes", ["automatic", "explicit", "shard_map"])
def test_gradients_sharded_by_heads_need_no_communication(mesh: Mesh, axes: str) -> None:
    case = VarlenCase("sharded", (150, 1, 0, 20), 16, 8, 16, arrays=("sinks", "alibi_slopes"))
    arrays, options = split_keywords(case() | {"query": case.weights()})
    names = [name for name in DIFFERENTIABLE if name in arrays]
    arrays |= {name: np.nan_to_num(arrays[name]) for name in names}
    leaves = {name: arrays.pop(name) for name in names}

    def loss(leaves: Any) -> Any:
        return (jax_frontend.varlen_attention(**leaves, **arrays, **options) ** 2).sum()

    differentiate = jax.grad(loss)
    alone = jax.jit(differentiate)(leaves)
    kind = AxisType.Auto if axes == "automatic" else AxisType.Explicit
    mesh = jax.make_mesh((4,), ("model",), (kind,), devices=jax.devices()[:4])
    specs = {
        name: P(None, "model", None) if x.ndim == 3 else P("model") for name, x in leaves.items()
    }
    if axes == "shard_map":
        differentiate = jax.shard_map(differentiate, mesh=mesh, in_specs=(specs,), out_specs=specs)
    with jax.set_mesh(mesh):
        sharded = {name: put(x, NamedSharding(mesh, specs[name])) for name, x in leaves.items()}
        program = jax.jit(differentiate).lower(sharded).compile()
        assert not COLLECTIVES.search(program.as_text())
        gradients = program(sharded)
    for name, gradient in gradients.items():
        assert "model" in gradient.sharding.spec
        compare(gradient, alone[name])


def training(kv_heads: int, **features: Any) -> tuple[dict[str, np.ndarray], Any]:
    """Arrays with gradients, and attention of two sequences."""
    rng = np.random.default_rng(0)
    shapes = {"query": (9, 8, 16), "key": (9, kv_heads, 16), "value": (9, kv_heads, 16)}
    shapes |= {"sinks": (8,), "alibi_slopes": (8,)}
    leaves = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    starts, count = np.int32([0, 5, 9]), np.int32([2])

    def attend(leaves: Any) -> jax.Array:
        return jax_frontend.varlen_attention(
            **leaves, query_start_loc=starts, num_seqs=count, scale=0.25, **features
        )

    return leaves, attend


def gradients(attend: Any) -> Any:
    return jax.jit(jax.grad(lambda leaves: (attend(leaves) ** 2).sum()))


@pytest.mark.parametrize("axes", ["automatic", "explicit", "shard_map", "unchecked shard_map"])
@pytest.mark.parametrize("arrays", ["all", "query", "constant slopes"])
def test_gradients_of_a_kv_head_that_devices_share(mesh: Mesh, axes: str, arrays: str) -> None:
    """Each device has a part of the query heads: parts of its gradients are added up."""
    leaves, attend = training(kv_heads=1)
    if arrays == "query":
        del leaves["sinks"], leaves["alibi_slopes"]
    elif arrays == "constant slopes":
        del leaves["alibi_slopes"]
        attend = training(kv_heads=1, alibi_slopes=np.full(8, 0.1, np.float32))[1]
    alone = gradients(attend)(leaves)
    kind = AxisType.Explicit if axes == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("model",), (kind,), devices=jax.devices()[:4])
    specs = {"query": P(None, "model"), "key": P(), "value": P()}
    specs |= {"sinks": P("model"), "alibi_slopes": P("model")}
    specs = {name: specs[name] for name in leaves}
    if "shard_map" in axes:
        if arrays == "constant slopes":
            attend = training(kv_heads=1, alibi_slopes=np.full(2, 0.1, np.float32))[1]
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=P(None, "model"),
            check_vma=axes == "shard_map",
        )
    elif axes == "explicit" and arrays == "constant slopes":
        slopes = put(np.full(8, 0.1, np.float32), NamedSharding(mesh, P("model")))
        attend = training(kv_heads=1, alibi_slopes=slopes)[1]
    with jax.set_mesh(mesh):
        sharded = {name: put(x, NamedSharding(mesh, specs[name])) for name, x in leaves.items()}
        found = gradients(attend)(sharded)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, alone[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_gradients_of_what_all_batches_share(mesh: Mesh, check_vma: bool) -> None:
    """Each device has a batch of its own, and the same sinks and slopes."""
    leaves, attend = training(kv_heads=2)
    shared = ("sinks", "alibi_slopes")
    batches = {
        name: x if name in shared else np.stack([x * (i + 1) for i in range(4)])
        for name, x in leaves.items()
    }

    def one_after_the_other(leaves: Any) -> jax.Array:
        parts = [
            attend({name: x if name in shared else x[i] for name, x in leaves.items()})
            for i in range(4)
        ]
        return jax.lax.concatenate(parts, 0)

    expected = gradients(one_after_the_other)(batches)
    mapped = jax.shard_map(
        lambda leaves: attend({n: x if n in shared else x[0] for n, x in leaves.items()}),
        mesh=mesh,
        in_specs=({name: P() if name in shared else P("model") for name in leaves},),
        out_specs=P("model"),
        check_vma=check_vma,
    )
    for name, gradient in gradients(mapped)(batches).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5)


def compare(actual: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("layout", HEAD_DIMS)
def test_a_donated_sharded_cache_is_updated_in_place(
    mesh: Mesh, partitioner: str, layout: str | None
) -> None:
    case = batch(kv_layout=layout)
    kv_cache = case.inputs().kv_cache
    value_cache = case.attributes().get("value_cache")
    key, value = np.random.default_rng(0).standard_normal((2, 5, 8, 16), np.float32)
    slots = np.array([3, -1, 17, 40, 8], np.int32)
    cache_sharding = along(mesh, kv_cache.ndim, HEAD_DIMS[layout])

    def update(caches: Any, *rest: Any) -> Any:
        kv_cache, value_cache = caches
        return jax_frontend.kv_cache_update(
            kv_cache, *rest, value_cache=value_cache, kv_layout=layout
        )

    alone = jax.jit(update)((kv_cache, value_cache), key, value, slots)
    caches = jax.device_put((kv_cache, value_cache), cache_sharding)
    rest = [*jax.device_put((key, value), along(mesh, 3, 1)), slots]
    jitted = jax.jit(update, donate_argnums=0)
    text = jitted.lower(caches, *rest).compile().as_text()
    assert "output_to_operand_aliasing" in hlo.custom_calls(text, UPDATE)[0]
    assert "input_output_alias" in text.partition("\n")[0]
    assert not COLLECTIVES.search(text) and " copy(" not in text
    compare(jitted(caches, *rest), alone)


@pytest.mark.parametrize("fields", [{}, {"norm": "per head", "hadamard": "kv", "has_signs": True}])
@pytest.mark.parametrize("num_kv_heads", [8, 1])
def test_rotated_queries_and_a_cache_sharded_by_heads(
    mesh: Mesh, partitioner: str, num_kv_heads: int, fields: dict[str, Any]
) -> None:
    """With one kv head, the heads of the query alone are sharded."""
    sizes = {"num_kv_heads": num_kv_heads, "num_heads": 16, "head_size": 18}
    case = UpdateCase("sharded", rotary_dim=16, **sizes, **fields)
    (kv_cache, key, value, slots), (given, constants) = (
        case.inputs(),
        split_keywords(case.attributes()),
    )
    rotary = [given.pop("query"), *given.values()]

    def update(kv_cache: Any, query: Any, *rest: Any) -> Any:
        key, value, slots, *options = rest
        named = dict(zip(given, options, strict=True)) | constants
        return jax_frontend.kv_cache_update(kv_cache, key, value, slots, query=query, **named)

    rest = [key, value, slots, *rotary[1:]]
    jitted = jax.jit(update, donate_argnums=(0, 1))
    alone = jitted(kv_cache, rotary[0], *rest)
    heads = 1 if num_kv_heads > 1 else None
    operands = [
        put(kv_cache, along(mesh, 4, 2 if num_kv_heads > 1 else None)),
        put(rotary[0], along(mesh, 3, 1)),
        *[put(x, along(mesh, 3, heads)) for x in (key, value)],
        *[put(x, along(mesh, x.ndim, None)) for x in rest[2:]],
    ]
    text = jitted.lower(*operands).compile().as_text()
    (call,) = hlo.custom_calls(text, UPDATE)
    assert f"[{len(key)},4,18]" in call.partition("custom-call")[0]
    assert not COLLECTIVES.search(text) and " copy(" not in text
    results = jitted(*operands)
    assert results[1].sharding.spec[1] == "model"
    compare(results, alone)


def test_a_norm_over_all_heads_gives_the_right_result(mesh: Mesh, partitioner: str) -> None:
    """Devices cannot share its heads: each has all of them."""
    case = UpdateCase("together", num_kv_heads=8, num_heads=16, norm="all heads")
    arrays, options = split_keywords(case.attributes())
    update = jax.jit(partial(jax_frontend.kv_cache_update, **options))
    kv_cache, key, *rest = case.inputs()
    sharded = jax.device_put(kv_cache, along(mesh, 4, 2)), jax.device_put(key, along(mesh, 3, 1))
    compare(update(*sharded, *rest, **arrays), update(kv_cache, key, *rest, **arrays))


@pytest.mark.parametrize("fields", [{"num_heads": 4, "num_kv_heads": 2}, {"kv_layout": "nb(2h)d"}])
def test_unshardable_heads_give_the_right_result(
    mesh: Mesh, partitioner: str, fields: dict[str, Any]
) -> None:
    """Fewer KV heads than devices, and a layout where a KV head is not in one piece."""
    case = batch(**fields)
    attend = jax.jit(partial(jax_frontend.paged_attention, **case.attributes()))
    query, *rest = case.inputs()
    compare(attend(jax.device_put(query, along(mesh, 3, 1)), *rest), attend(query, *rest))


def test_only_the_result_is_sharded(mesh: Mesh, partitioner: str) -> None:
    case = batch()
    attend = partial(jax_frontend.paged_attention, **case.attributes())
    result = jax.jit(attend, out_shardings=along(mesh, 3, 1))(*case.inputs())
    assert result.sharding.spec[1] == "model"
    compare(result, attend(*case.inputs()))


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_vmap_of_calls_sharded_by_heads(mesh: Mesh, partitioner: str, is_shared: bool) -> None:
    """Each device makes one call on its heads, for the whole batch."""
    case, in_axes = batch(return_lse=True), (0, None if is_shared else 0, 0, None, None, None)
    operands, _, options = shard_by_heads(mesh, case)
    alone = [np.asarray(x) for x in case.inputs()]
    for i, dim in ((0, 2), (1, 3), (2, None)):
        if in_axes[i] == 0:
            alone[i] = np.stack([alone[i], alone[i][::-1] if i == 0 else alone[i]])
            operands[i] = put(alone[i], along(mesh, alone[i].ndim, dim))
    many = jax.vmap(
        partial(jax_frontend.paged_attention, **options), in_axes, spmd_axis_name="data"
    )
    text = jax.jit(many).lower(*operands).compile().as_text()
    (call,) = hlo.custom_calls(text, ATTENTION)
    assert not COLLECTIVES.search(text) and " while(" not in text
    assert f"[{2 * alone[0].shape[1]},4,16]" in call.partition("custom-call")[0]
    compare(jax.jit(many)(*operands), jax.jit(many)(*alone))


def test_vmap_of_updates_sharded_by_heads(mesh: Mesh, partitioner: str) -> None:
    rng = np.random.default_rng(0)
    caches = rng.standard_normal((3, 6, 4, 16, 8), np.float32)
    key = rng.standard_normal((3, 5, 8, 8), np.float32)
    slots = np.array([[3, -1, 17, 23, 8]] * 3, np.int32)
    many = jax.vmap(jax_frontend.kv_cache_update)
    alone = np.asarray(jax.jit(many)(caches, key, key, slots))
    keys = put(key, along(mesh, 4, 2))
    operands = put(caches, along(mesh, 5, 3)), keys, keys, put(slots, along(mesh, 2, None))
    step = jax.jit(many, donate_argnums=0)
    text = step.lower(*operands).compile().as_text()
    assert not COLLECTIVES.search(text) and " copy(" not in text
    compare(step(*operands), alone)


def test_sharding_the_context(mesh: Mesh) -> None:
    check_sharding_of_the_context(mesh)


def check_sharding_of_the_context(mesh: Mesh) -> None:
    """Context parallel decoding: each of four devices holds every fourth block of every sequence
    and attends to it. The partial results are merged."""
    lengths, block_size, width = np.array([90, 5, 33, 1]), 4, 24
    rng = np.random.default_rng(0)
    query = rng.standard_normal((4, 16, 32), np.float32)
    kv_cache = rng.standard_normal((4 * width, block_size, 16, 32), np.float32)
    tables = rng.permutation(4 * width).reshape(4, width).astype(np.int32)
    start, num_seqs = np.arange(5, dtype=np.int32), np.array([4], np.int32)
    whole = jax_frontend.paged_attention(
        query, kv_cache, lengths.astype(np.int32), tables, start, num_seqs, 0.2
    )

    # Rank r has the blocks r, r + 4, ... of a sequence, in this order in its pool.
    pools: Any = np.stack(
        [kv_cache[tables[:, r::4]].reshape(-1, *kv_cache.shape[1:]) for r in range(4)]
    )
    own_tables = np.arange(4 * width // 4, dtype=np.int32).reshape(4, width // 4)
    last, filled = np.divmod(lengths - 1, block_size)
    own_lengths = [
        np.where(last % 4 >= r, last // 4 + 1, last // 4) * block_size
        - np.where(last % 4 == r, block_size - 1 - filled, 0)
        for r in range(4)
    ]
    assert sum(own_lengths).tolist() == lengths.tolist()  # type: ignore[union-attr]

    def attend(query: Any, pool: Any, lengths: Any) -> Any:
        output, lse = jax_frontend.paged_attention(
            *(query, pool[0], lengths[0], own_tables, start, num_seqs, 0.2),
            causal=False,
            return_lse=True,
        )
        parts = jax.lax.all_gather((output, lse), "model")
        return jax_frontend.merge_attention(*parts)[0]

    manual = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(P(), P("model"), P("model")),
            out_specs=P(),
            check_vma=False,
        )
    )
    pools = put(pools, along(mesh, pools.ndim, 0))
    result = manual(query, pools, put(np.stack(own_lengths).astype(np.int32), along(mesh, 2, 0)))
    np.testing.assert_allclose(result, whole, rtol=1e-5, atol=1e-6)


PROCESS = """
    import sys
    import jax, numpy as np
    rank, address = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    from functools import partial
    from jax.sharding import Mesh
    import jax_frontend
    from tests.jax_frontend.test_sharding import (
        COLLECTIVES, batch, check_sharding_of_the_context, shard_by_heads,
    )

    assert jax.process_count() == 2 and len(jax.local_devices()) == 2
    mesh, case = Mesh(np.array(jax.devices()), ("model",)), batch()
    operands, _, options = shard_by_heads(mesh, case)
    attend = jax.jit(partial(jax_frontend.paged_attention, **options))
    assert not COLLECTIVES.search(attend.lower(*operands).compile().as_text())
    expected = np.asarray(attend(*case.inputs()))
    shards = attend(*operands).addressable_shards
    assert len(shards) == 2
    for shard in shards:
        assert np.array_equal(np.asarray(shard.data), expected[shard.index])
    check_sharding_of_the_context(mesh)
    print("the same bits")
"""


def test_two_processes() -> None:
    address = scripts.free_address()
    commands = [("0", address), ("1", address)]
    printed = scripts.run_together(PROCESS, commands, JAX_NUM_CPU_DEVICES="2")
    assert [text.splitlines()[-1] for text in printed] == ["the same bits"] * 2  # Gloo prints, too


MARKED = """
    import sys
    from pathlib import Path
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as spmd
    from harness import hlo
    from tests.support import backends, calls
    from tests.jax_frontend.test_sharding import ATTENTION, COLLECTIVES, FEATURES, HEAD_DIMS, UPDATE, batch, compare

    torch_xla.runtime.use_spmd()
    mesh = spmd.Mesh(np.arange(8), (2, 4), ("data", "model"))
    programs = hlo.CompiledPrograms(Path(sys.argv[1]))

    def mark(tensor, dim):
        axes = ("model" if i == dim else None for i in range(tensor.dim()))
        spmd.mark_sharding(tensor, mesh, (*axes,))
        return tensor

    for fields in FEATURES.values():
        case = batch(**fields)
        inputs, attributes = case.inputs(), case.attributes()
        if not backends.are_of_torch_xla(calls.split_keywords(attributes)[0]):
            continue
        # Where there is one kv head, the devices share the query heads.
        marked = (inputs.kv_cache, attributes.get("value_cache")), HEAD_DIMS[case.kv_layout]
        marked = marked if case.num_kv_heads > 1 else ((inputs.query,), 1)

        def convert(array):
            tensor = backends.to_xla(array)
            return mark(tensor, marked[1]) if any(array is x for x in marked[0]) else tensor

        alone = backends.in_torch("paged_attention", *inputs, **attributes)
        for compile_with in (None, "openxla"):
            before = len(programs.all())
            result = backends.call_torch(convert, compile_with, "paged_attention", *inputs, **attributes)
            compare(result, alone)
            made = [y for x, y in programs.all()[before:] if hlo.custom_calls(x, ATTENTION)]
            assert made
            for text in made:
                (call,) = hlo.custom_calls(text, ATTENTION)
                num_tokens, heads = inputs.query.shape[0], case.num_heads // 4
                columns = case.value_head_size or case.own_value_head_size or 16
                assert f"[{num_tokens},{heads},{columns}]" in call.partition("custom-call")[0], call
                assert not COLLECTIVES.search(text), text

    case = batch()
    query, kv_cache, *metadata = map(backends.to_xla, case.inputs())
    whole = kv_cache.clone()
    mark(kv_cache, 2)
    made = []
    for _ in range(3):
        key, value = torch.randn(2, 5, 8, 16, device="xla")
        slots = torch.tensor([3, -1, 17, 40, 8], device="xla", dtype=torch.int32)
        torch_xla.sync()
        before = len(programs.all())
        torch.ops.xla_gpu.kv_cache_update(kv_cache, key, value, slots)
        result = torch.ops.xla_gpu.paged_attention(query, kv_cache, *metadata, 0.25)
        torch_xla.sync()
        made += [y for x, y in programs.all()[before:] if hlo.custom_calls(x, UPDATE)]
        torch.ops.xla_gpu.kv_cache_update(whole, key, value, slots)
        alone = torch.ops.xla_gpu.paged_attention(query, whole, *metadata, 0.25)
        compare(backends.to_numpy(result), backends.to_numpy(alone))
        compare(backends.to_numpy(kv_cache), backends.to_numpy(whole))
    assert made
    for text in made:
        assert "output_to_operand_aliasing" in hlo.custom_calls(text, UPDATE)[0]
        assert "input_output_alias" in text.partition("\\n")[0]
        assert not COLLECTIVES.search(text) and " copy(" not in text, text
    print("the same bits")
"""


def test_torch_xla_sharded_caches(tmp_path: Path) -> None:
    """Only the caches are marked as sharded. Each device calls the handler on its heads, sends
    nothing and updates its cache in place."""
    flags = scripts.dump_flags(tmp_path)
    lines = scripts.output(MARKED, str(tmp_path), CPU_NUM_DEVICES="8", XLA_FLAGS=flags)
    assert lines == ["the same bits"]


MANUAL = """
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as spmd
    import torch_frontend
    from harness import hlo
    from tests.support import backends
    from tests.jax_frontend.test_sharding import ATTENTION, batch

    torch_xla.runtime.use_spmd()
    mesh, case = spmd.Mesh(np.arange(4), (4,), ("model",)), batch()
    inputs, scale = case.inputs(), case.attributes()["scale"]
    expected = backends.in_torch("paged_attention", *inputs, scale=scale)
    heads = {0: (None, "model", None), 1: (None, None, "model", None)}

    manual = [
        spmd.enable_manual_sharding(x, heads.get(i, (None,) * x.dim()), mesh=mesh).global_tensor
        for i, x in enumerate(backends.to_xla(x) for x in inputs)
    ]
    part = torch.ops.xla_gpu.paged_attention(*manual, scale)
    (call,) = hlo.custom_calls(hlo.from_torch_xla([part]), ATTENTION)
    assert call.startswith(f"f32[{len(expected)},4,16]"), call
    whole = spmd.disable_manual_sharding(part, heads[0], expected.shape, mesh=mesh).global_tensor
    backends.np.testing.assert_array_equal(backends.to_numpy(whole), expected)

    tokens = backends.to_xla(inputs.query)
    spmd.mark_sharding(tokens, mesh, ("model", None, None))
    result = torch.ops.xla_gpu.paged_attention(tokens, *map(backends.to_xla, inputs[1:]), scale)
    backends.np.testing.assert_array_equal(backends.to_numpy(result), expected)
    print("the same bits")
"""


def test_other_shardings_of_torch_xla() -> None:
    """Manual sharding gives each device its heads. Other shardings are gathered, with the right
    result."""
    assert scripts.output(MANUAL, CPU_NUM_DEVICES="4") == ["the same bits"]
