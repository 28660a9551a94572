"""Serving programs exported with symbolic sizes, for processes that only register the handlers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_frontend
from harness.compare import assert_same_bits
from jax_frontend.compat import ejkernel, pallas_tpu, sglang_jax
from shared_ffi import paged_attention
from shared_ffi.xla.lowering import EXTREMES
from tests.support import scripts

CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(f"xla_gpu_{op}")
    for op in (
        *("paged_attention", "kv_cache_update"),
        *("varlen_attention", "varlen_attention_backward"),
    )
]
F32, I32 = np.float32, np.int32


def decode(kv_cache: Any, key: Any, value: Any, query: Any, lengths: Any, tables: Any) -> Any:
    """A step of a server: one token of each sequence."""
    sequences = jnp.arange(query.shape[0], dtype=jnp.int32)
    last = lengths - 1
    slots = tables[sequences, last // 16] * 16 + last % 16
    kv_cache = jax_frontend.kv_cache_update(kv_cache, key, value, slots)
    start = jnp.arange(query.shape[0] + 1, dtype=jnp.int32)
    output = jax_frontend.paged_attention(
        *(query, kv_cache, lengths, tables, start, start[-1], 0.125), max_query_len=1
    )
    return output, kv_cache


def decode_arrays(batch_size: int, pages_per_seq: int) -> list[np.ndarray]:
    rng = np.random.default_rng(batch_size)
    shapes = [(64, 16, 4, 64), *((batch_size, heads, 64) for heads in (2, 2, 8))]
    lengths = rng.integers(1, 16 * pages_per_seq + 1, batch_size).astype(I32)
    tables = rng.permutation(64)[: batch_size * pages_per_seq].reshape(batch_size, -1)
    return [*(rng.standard_normal(x, F32) for x in shapes), lengths, tables.astype(I32)]


LOADED = """
    import sys
    import jax, numpy as np, shared_ffi
    shared_ffi.register()
    folder = sys.argv[1]
    step = jax.export.deserialize(open(f"{folder}/program", "rb").read()).call
    for name in ("1", "7"):
        arrays = np.load(f"{folder}/{name}.npz").values()
        output, kv_cache = jax.jit(step, donate_argnums=0)(*arrays)
        np.savez(f"{folder}/{name}-results.npz", output, kv_cache)
    print("jax_frontend" in sys.modules)
"""


def test_a_server_loads_one_program_for_all_batch_sizes(tmp_path: Path) -> None:
    batch, pages = jax.export.symbolic_shape("batch, pages")
    of = jax.ShapeDtypeStruct
    tokens = [of((batch, heads, 64), F32) for heads in (2, 2, 8)]
    arguments = of((64, 16, 4, 64), F32), *tokens, of((batch,), I32), of((batch, pages), I32)
    step = jax.jit(decode, donate_argnums=0)
    export = jax.export.export(step, disabled_checks=CHECKS, platforms=["cpu", "cuda"])
    (tmp_path / "program").write_bytes(export(*arguments).serialize())
    inputs = {"1": decode_arrays(1, 2), "7": decode_arrays(7, 9)}
    for name, arrays in inputs.items():
        np.savez(tmp_path / f"{name}.npz", *arrays)
    assert scripts.output(LOADED, str(tmp_path)) == ["False"]
    for name, arrays in inputs.items():
        results = np.load(tmp_path / f"{name}-results.npz").values()
        expected = step(*map(jnp.asarray, arrays))
        assert_same_bits(tuple(results), tuple(map(np.asarray, expected)))


# For each function, the shapes of its arguments: float32 in front, int32 after the bar.
def train(*arrays: Any) -> Any:
    """Attention of packed sequences to themselves, and its gradients."""
    rows, batch = arrays[:3], arrays[3:]

    def attend(*rows: Any) -> Any:
        return jax_frontend.varlen_attention(
            *rows, *batch, 0.25, 9, causal=False, window_right=7, max_query_len=64
        )

    output, pullback = jax.vjp(attend, *rows)
    return output, pullback(output)


FUNCTIONS: dict[str, tuple[Any, str]] = {
    "training": (train, "t,8,64 t,2,64 t,2,32 | s+1 1"),
    "v3": (
        jax_frontend.ragged_paged_attention_v3,
        "t,8,128 t,2,128 t,2,128 16,16,4,1,128 | s 4*s s+1 3",
    ),
    "hd64": (
        jax_frontend.ragged_paged_attention_hd64,
        "t,8,64 t,2,64 t,2,64 16,16,2,1,128 | s 4*s s+1 3",
    ),
    "sglang-jax": (
        sglang_jax.ragged_paged_attention,
        "t,8,128 t,2,128 t,2,128 16,16,4,1,128 | s p s+1 s+1 3",
    ),
    "ejKernel": (
        ejkernel.ragged_page_attention_v3,
        "t,8,128 t,2,128 t,2,128 16,16,4,1,128 | s 4*s s+1 3",
    ),
    "unified": (ejkernel.unified_attention, "t,8,64 16,16,2,64 16,16,2,64 | s s,p s+1"),
    "Pallas": (pallas_tpu.paged_attention, "s,8,64 2,16,16,64 2,16,16,64 | s s,p"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exports_with_symbolic_sizes(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    scope = jax.export.SymbolicScope()
    arguments = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype)
        for dtype, part in zip((F32, I32), shapes.split("|"), strict=True)
        for shape in part.split()
    ]
    export = jax.export.export(
        jax.jit(lambda *arrays: function(*arrays)),
        disabled_checks=CHECKS,
        platforms=["cpu", "cuda"],
    )
    program = export(*arguments).mlir_module()
    assert f"xla_gpu_{'varlen' if name == 'training' else 'paged'}_attention" in program


SHARDED = """
    import sys
    import jax, numpy as np, shared_ffi
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    shared_ffi.register()
    folder = sys.argv[1]
    exported = jax.export.deserialize(open(f"{folder}/program", "rb").read())
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,))
    specs = [P(None, "model"), P(None, None, "model"), P(), P(), P(), P()]
    arrays = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(np.load(f"{folder}/arrays.npz").values(), specs)
    ]
    step = jax.jit(exported.call)
    print("all-gather" in step.lower(*arrays).compile().as_text(), "jax_frontend" in sys.modules)
    np.savez(f"{folder}/results.npz", step(*arrays))
"""


def test_program_sharded_by_heads(tmp_path: Path) -> None:
    """It is partitioned where it is loaded, in a process that only registers the handlers."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 16, 64), F32), rng.standard_normal((16, 16, 8, 64), F32)]
    arrays += [np.array(x, I32) for x in ([45], [[7, 2, 9]], [0, 1], [1])]
    attend = jax.jit(lambda *arrays: jax_frontend.paged_attention(*arrays, 0.125))
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])
    specs = [P(None, "model"), P(None, None, "model"), P(), P(), P(), P()]
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    export = jax.export.export(attend, disabled_checks=CHECKS)
    (tmp_path / "program").write_bytes(export(*sharded).serialize())
    np.savez(tmp_path / "arrays.npz", *arrays)
    lines = scripts.output(SHARDED, str(tmp_path), JAX_NUM_CPU_DEVICES="4")
    assert lines == ["False False"]
    (result,) = np.load(tmp_path / "results.npz").values()
    assert_same_bits(result, np.asarray(attend(*arrays)))


def test_vmap_over_symbolic_axis() -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    of = jax.ShapeDtypeStruct
    shapes = [((batch, 2, 16, 64), F32), ((16, 16, 8, 64), F32)]
    shapes += [((batch, *shape), I32) for shape in ((2,), (2, 3), (3,), (1,))]
    attend = jax.vmap(
        lambda *arrays: jax_frontend.paged_attention(*arrays, 0.125), (0, None, 0, 0, 0, 0)
    )
    export = jax.export.export(jax.jit(attend), disabled_checks=CHECKS)
    program = jax.export.deserialize(export(*[of(*x) for x in shapes]).serialize())
    rng = np.random.default_rng(0)
    for size in (1, 3):
        tables = rng.permutation(16)[: 2 * 3].reshape(2, 3)
        arrays = [rng.standard_normal((size, 2, 16, 64), F32)]
        arrays += [rng.standard_normal((16, 16, 8, 64), F32)]
        metadata = ([45, 3], tables, [0, 1, 2], [2])
        arrays += [np.stack([np.array(x, I32)] * size) for x in metadata]
        assert_same_bits(np.asarray(program.call(*arrays)), np.asarray(attend(*arrays)))


def test_the_scratch_of_symbolic_sizes_takes_few_steps() -> None:
    """JAX compares symbolic sizes by a search, which took 90 s where terms were nested."""
    batch, pages = jax.export.symbolic_shape("batch, pages")
    attributes = {"sliding_window": 0, "max_query_len": 1}
    num_calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        paged_attention.scratch_bytes(batch, 32, 8, 64, batch, 16 * pages, attributes, EXTREMES)
    finally:
        sys.setprofile(None)
    assert num_calls < 20_000_000
