"""tpu-inference's ``kv_cache_update``, which goes with version 2 of its ragged paged attention."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_frontend import kv_cache_update as ours
from jax_frontend._call import takes_arrays
from shared_ffi.spec import shape_error, value_error

OP = "tpu_inference.kv_cache_update"


@takes_arrays(OP)
def kv_cache_update(
    new_kv: jax.Array,
    slices: jax.Array,
    kv_cache: jax.Array,
    num_slices: jax.Array,
    *,
    page_size: int = 32,
    num_slices_per_block: int | None = None,
    mesh: Mesh | None = None,
    kv_cache_pspec: PartitionSpec | None = None,
    dynamic_validate_inputs: bool = False,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Copies runs of new rows, each within a page, into the cache, which is donated.

    Args:
        new_kv: ``[num_tokens, 2 * num_kv_heads, head_dim]``, dtype of ``kv_cache``; the K of kv
            head h at index 2h, its V at 2h + 1.
        slices: ``[3, max_slices]`` int32: the first row in the cache, the first row in ``new_kv``
            and the number of rows of each run. The runs are in the order of ``new_kv``'s rows.
        kv_cache: ``[num_pages * page_size, 2 * num_kv_heads, head_dim]``.
        num_slices: ``[1]`` int32: how many of the slices are runs.
        page_size: rows of a page; only ``dynamic_validate_inputs`` needs it.
        mesh: the devices that the call is divided among, inside ``jax.shard_map``. None: the caller
            divides it, or does not.
        kv_cache_pspec: with ``mesh``, the partition of ``new_kv`` and of ``kv_cache``.
        dynamic_validate_inputs: check the runs before the call, which needs their values. Rows
            past the end of the cache are an error in any case.
        num_slices_per_block, vmem_limit_bytes: tune the TPU's kernel; not used.

    Returns:
        The updated cache.

    Raises:
        ValueError: a shape is wrong; ``mesh`` is given without ``kv_cache_pspec``; a run is wrong
            and ``dynamic_validate_inputs`` is true.
        TypeError: a dtype is wrong.
        jax.errors.JaxRuntimeError, or ValueError: as ``jax_frontend.kv_cache_update``.
    """
    if slices.ndim != 2 or slices.shape[0] != 3:
        remedy = "Its rows are places in the cache, places in new_kv, and numbers of rows"
        raise shape_error(OP, "slices", "[3, max_slices]", slices.shape, remedy)
    if num_slices.shape != (1,):
        raise shape_error(OP, "num_slices", "[1]", num_slices.shape, "It is one number")
    if mesh is not None and kv_cache_pspec is None:
        remedy = "Pass the partition of new_kv and kv_cache"
        raise value_error(OP, "kv_cache_pspec", "be given with mesh", None, remedy)
    if dynamic_validate_inputs:
        _check_values(np.asarray(slices), int(num_slices[0]), new_kv, kv_cache, page_size)
    return _update(new_kv, slices, kv_cache, num_slices, mesh=mesh, spec=kv_cache_pspec)


@partial(jax.jit, donate_argnames="kv_cache", static_argnames=("mesh", "spec"))
def _update(
    new_kv: jax.Array,
    slices: jax.Array,
    kv_cache: jax.Array,
    num_slices: jax.Array,
    *,
    mesh: Mesh | None,
    spec: PartitionSpec | None,
) -> jax.Array:
    if mesh is None:
        return _update_part(new_kv, slices, kv_cache, num_slices)
    whole = PartitionSpec()
    divided = jax.shard_map(
        _update_part,
        mesh=mesh,
        in_specs=(spec, whole, spec, whole),
        out_specs=spec,
        check_vma=False,
    )
    return divided(new_kv, slices, kv_cache, num_slices)


def _update_part(
    new_kv: jax.Array, slices: jax.Array, kv_cache: jax.Array, num_slices: jax.Array
) -> jax.Array:
    slots = _slot_mapping(slices, num_slices, len(new_kv))
    pairs = new_kv.reshape(len(new_kv), -1, 2, new_kv.shape[2])
    # The rows of this cache are slots. Reshaped to pages, it would be copied.
    return ours(kv_cache, pairs[:, :, 0], pairs[:, :, 1], slots, kv_layout="n(h2)d")


def _slot_mapping(slices: jax.Array, num_slices: jax.Array, num_tokens: int) -> jax.Array:
    """The row of the cache that each new row goes to; -1 if it is in no run."""
    in_cache, first, length = slices
    is_run = jnp.arange(slices.shape[1]) < num_slices
    first = jnp.where(is_run, first, jnp.iinfo(first.dtype).max)
    token = jnp.arange(num_tokens, dtype=first.dtype)
    # Not jnp.searchsorted, which JAX 0.10 refuses in a checked shard_map.
    run = jnp.sum(first[None] <= token[:, None], axis=1) - 1
    offset = token - first[run]
    # No sum of corrupt numbers names a row: it would be that of another sequence.
    is_row = (run >= 0) & (first[run] >= 0) & (offset < length[run]) & (in_cache[run] >= 0)
    return jnp.where(is_row, in_cache[run] + offset, -1)


def _check_values(
    slices: np.ndarray, num_slices: int, new_kv: jax.Array, kv_cache: jax.Array, page_size: int
) -> None:
    """Raises ValueError for the first run that is wrong."""
    if not 0 <= num_slices <= slices.shape[1]:
        rule = f"be from 0 to the {slices.shape[1]} columns of slices"
        raise value_error(OP, "num_slices", rule, num_slices, "It counts the runs")
    row, used = 0, np.zeros(len(kv_cache), bool)
    for i, (in_cache, first, length) in enumerate(slices[:, :num_slices].T.tolist()):
        page = in_cache // page_size
        rules = {
            f"have 1 to page_size={page_size} rows": 1 <= length <= page_size,
            f"lie in the {len(kv_cache)} rows of kv_cache": 0 <= in_cache <= len(kv_cache) - length,
            f"lie in one page of {page_size} rows": page == (in_cache + length - 1) // page_size,
            f"lie in the {len(new_kv)} rows of new_kv": 0 <= first <= len(new_kv) - length,
            f"begin at row {row} of new_kv, where the last ends": i == 0 or first == row,
            "name rows of the cache that no other slice names": not used[
                max(in_cache, 0) : max(in_cache + length, 0)
            ].any(),
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                got = [in_cache, first, length]
                remedy = "These are its rows in the cache and in new_kv, and their number"
                raise value_error(OP, f"slices[:, {i}]", rule, got, remedy)
        used[in_cache : in_cache + length] = True
        row = first + length
