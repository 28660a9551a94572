"""How devices share a call: by kv heads, each with its part of the cache, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import Mesh

from shared_ffi import lowering, sharding
from shared_ffi.spec import Call


def shared_by_heads(
    call: Call, call_on: Callable[..., Call], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """The results of a call; its program on several devices takes arrays sharded by heads as they
    are, and replicates what is sharded otherwise.

    Args:
        call: on whole arrays.
        call_on: the call on a device's parts of them.
        arrays: its operands.
    """

    def on_device(*parts: jax.Array) -> tuple[jax.Array, ...]:
        return lowering.ffi_call(call_on(*parts), *parts)

    if call.num_kv_heads == 0:
        return on_device(*arrays)

    def partition(mesh: Mesh, operands: Any, results: Any) -> Any:
        of_operands, of_results = _shardings(call, [*operands, *results])
        return mesh, on_device, of_results, of_operands

    def infer_results(mesh: Mesh, operands: Any, results: Any) -> Any:
        return _shardings(call, operands)[1]

    function = custom_partitioning(on_device)
    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer_results,
        decode_shardings=False,  # a mesh axis may be shared between kv heads and copies of them
        sharding_rule=_rule(call),
    )
    results: tuple[jax.Array, ...] = function(*arrays)
    return results


def _shardings(call: Call, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of operands and of results: by heads as some of these arrays are, if kv heads can be; other
    dimensions are replicated."""
    # GSPMD asks before it knows all of them.
    a_sharding = next(array.sharding for array in arrays if array.sharding is not None)
    hlo_type = type(a_sharding._to_xla_hlo_sharding(0))
    texts = sharding.shardings(call, sharding.by_heads(call, [*map(_devices, arrays)]))
    each = tuple(
        type(a_sharding)(a_sharding._device_assignment, hlo_type.from_string(x)) for x in texts
    )
    return each[: len(call.operands)], each[len(call.operands) :]


def _devices(array: Any) -> np.ndarray | None:
    """Which devices have each tile of an array, if it has tiles."""
    if array.sharding is None:
        return None
    hlo = array.sharding._to_xla_hlo_sharding(len(array.shape))
    if not hlo.is_tiled():
        return None
    tiles = hlo.tile_assignment_dimensions()
    return np.array(hlo.tile_assignment_devices()).reshape(tiles)


def _rule(call: Call) -> SdyShardingRule:
    """Factor k, kv heads, is shared by all; every other dimension is replicated."""
    mappings, sizes = [], dict[str, Any]()
    others: list[str] = []
    for number, (spec, head_dim) in enumerate(call.arrays()):
        factors: list[Any] = []
        for dim, size in enumerate(spec.shape):
            name = f"a{number}_{dim}"
            if dim != head_dim:
                others.append(name)
                factors.append(name)
            elif size == call.num_kv_heads:
                factors.append("k")
            else:
                sizes[name] = size // call.num_kv_heads
                factors.append(CompoundFactor("k", name))
        mappings.append(ArrayMapping(*factors))
    if not any("k" in mapping for mapping in mappings):
        sizes["k"] = call.num_kv_heads
    return SdyShardingRule(
        tuple(mappings[: len(call.operands)]),
        tuple(mappings[len(call.operands) :]),
        need_replication_factors=tuple(others),
        **sizes,
    )
