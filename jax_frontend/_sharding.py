"""The rules for several devices: each has a part of the heads (shared_ffi/sharding.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def with_partition_rules(
    call: Call, check_parts: Callable[..., Call]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of arrays that makes a call, on one device or on several.

    Several devices take arrays that are sharded by heads as they are. XLA replicates arrays that
    are sharded in another way.

    Args:
        call: the call on whole arrays.
        check_parts: checks the call on a device's parts of the arrays.
    """
    function = partial(lowering.ffi_call, call)
    if call.num_shared_heads == 0:
        return function
    partitioned = custom_partitioning(function)
    partitioned.def_partition(
        partition=partial(_partition, call, check_parts),
        infer_sharding_from_operands=partial(_infer_results, call),
        decode_shardings=False,  # a mesh axis may be shared between kv heads and copies of them
        sharding_rule=_shardy_rule(call),
    )
    return partitioned


def _partition(
    call: Call, check_parts: Callable[..., Call], mesh: Mesh, operands: Any, results: Any
) -> Any:
    """JAX's rule for partitioning: the function of one device, and the shardings that it needs."""
    operand_shardings, result_shardings = _shardings(call, [*operands, *results])
    return mesh, partial(_call_on_parts, check_parts), result_shardings, operand_shardings


def _infer_results(call: Call, mesh: Mesh, operands: Any, results: Any) -> Any:
    """JAX's rule for propagation: the shardings of results that follow from those of operands."""
    return _shardings(call, operands)[1]


def _call_on_parts(check_parts: Callable[..., Call], *parts: jax.Array) -> tuple[jax.Array, ...]:
    return lowering.ffi_call(check_parts(*parts), *parts)


def _shardings(call: Call, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shardings of operands and of results: heads are sharded as in one of these arrays, if
    they can be; other dimensions are replicated."""
    # GSPMD asks before it knows the sharding of every array.
    known = next(array.sharding for array in arrays if array.sharding is not None)
    hlo_type = type(known._to_xla_hlo_sharding(0))
    texts = sharding.shardings(call, sharding.by_heads(call, [*map(_devices, arrays)]))
    shardings = [type(known)(known._device_assignment, hlo_type.from_string(x)) for x in texts]
    count = len(call.operands)
    return tuple(shardings[:count]), tuple(shardings[count:])


def _devices(array: Any) -> np.ndarray | None:
    """The devices that have each tile of an array; None if it is not tiled."""
    if array.sharding is None:
        return None
    hlo = array.sharding._to_xla_hlo_sharding(len(array.shape))
    if not hlo.is_tiled():
        return None
    tiles = hlo.tile_assignment_dimensions()
    return np.array(hlo.tile_assignment_devices()).reshape(tiles)


def _shardy_rule(call: Call) -> SdyShardingRule:
    """The rule for Shardy: arrays with heads have the factor k, the shared heads; every other
    dimension is replicated."""
    mappings: list[ArrayMapping] = []
    sizes: dict[str, Any] = {}
    replicated: list[str] = []
    for number, (spec, head_dim) in enumerate(call.arrays()):
        factors: list[str | CompoundFactor] = []
        for dim, size in enumerate(spec.shape):
            name = f"a{number}_{dim}"
            if dim != head_dim:
                replicated.append(name)
                factors.append(name)
            elif size == call.num_shared_heads:
                factors.append("k")
            else:
                sizes[name] = size // call.num_shared_heads
                factors.append(CompoundFactor("k", name))
        mappings.append(ArrayMapping(*factors))
    if not any("k" in mapping for mapping in mappings):
        sizes["k"] = call.num_shared_heads
    return SdyShardingRule(
        tuple(mappings[: len(call.operands)]),
        tuple(mappings[len(call.operands) :]),
        need_replication_factors=tuple(replicated),
        **sizes,
    )
