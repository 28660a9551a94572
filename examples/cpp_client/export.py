"""Writes what the C++ client runs: a decoding step, exported with jax.export, and its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import xla_client

import jax_frontend

BLOCK_SIZE = 16
_CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(f"xla_gpu_{op}")
    for op in ("kv_cache_update", "paged_attention")
]


def step(
    kv_cache: jax.Array,
    context_lens: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes a token of each sequence to the cache and attends to it.

    Returns:
        the first three arguments of the next step: the cache, the new lengths, and the output in
        place of the next layer's query.
    """
    batch_size = len(context_lens)
    sequences = jnp.arange(batch_size)
    blocks = block_tables[sequences, context_lens // BLOCK_SIZE]
    slots = blocks * BLOCK_SIZE + context_lens % BLOCK_SIZE
    kv_cache = jax_frontend.kv_cache_update(kv_cache, key, value, slots)
    context_lens = context_lens + 1
    start = jnp.arange(batch_size + 1, dtype=jnp.int32)
    scale = query.shape[-1] ** -0.5
    output = jax_frontend.paged_attention(
        *(query, kv_cache, context_lens, block_tables, start, start[-1]), scale, max_query_len=1
    )
    return kv_cache, context_lens, output


JITTED = jax.jit(step, donate_argnums=(0, 1, 2))


def arguments(batch_size: int, dtype: str, blocks_per_seq: int = 4) -> list[np.ndarray]:
    """Arguments of a step: 8 query heads of 64 over 2 kv heads, and contexts of some blocks."""
    rng = np.random.default_rng(batch_size)
    num_blocks = batch_size * blocks_per_seq
    shapes = [(num_blocks, BLOCK_SIZE, 4, 64), *((batch_size, heads, 64) for heads in (8, 2, 2))]
    cache, query, key, value = (rng.standard_normal(x).astype(jnp.dtype(dtype)) for x in shapes)
    longest = (blocks_per_seq - 1) * BLOCK_SIZE  # a block is left for the new tokens
    lengths = rng.integers(1, longest + 1, batch_size, np.int32)
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(batch_size, -1)
    return [cache, lengths, query, key, value, tables]


def write(folder: Path, arrays: Sequence[np.ndarray], platform: str = "cpu") -> None:
    """Writes the program for arrays of these shapes, how to compile it, and the arrays."""
    export = jax.export.export(JITTED, platforms=[platform], disabled_checks=_CHECKS)
    program = export(*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program").write_bytes(program.mlir_module_serialized)
    (folder / "compile_options").write_bytes(xla_client.CompileOptions().SerializeAsString())
    lines = [f"{array.dtype} {' '.join(map(str, array.shape))}\n" for array in arrays]
    (folder / "arguments").write_text("".join(lines))
    for i, array in enumerate(arrays):
        (folder / str(i)).write_bytes(array.tobytes())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.cpp_client.export", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    write(options.folder, arguments(options.batch_size, options.dtype), options.platform)


if __name__ == "__main__":
    main()
