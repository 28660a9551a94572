"""How devices share a call: by kv heads, each with its part of the cache, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared_ffi.spec import ArraySpec, Call


def by_heads(call: Call, devices: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """``[num_parts, copies]``: the devices that have each part of the kv heads, as the first array
    has them that is sharded by heads; None if none is.

    Args:
        call: on whole arrays.
        devices: of some operands and results, the first ones: which devices have each tile, in an
            array whose first dimensions are those of the operand; None: not known, or all.
    """
    for tiles, dim in zip(devices, call.head_dims, strict=False):
        if tiles is None or dim is None:
            continue
        num_parts = tiles.shape[dim]
        if num_parts > 1 and call.num_kv_heads % num_parts == 0:
            return np.moveaxis(tiles, dim, 0).reshape(num_parts, -1)
    return None


def parts(call: Call, devices: np.ndarray) -> list[ArraySpec]:
    """What each device has of the operands.

    Args:
        devices: from `by_heads`.
    """
    operands = call.arrays()[: len(call.operands)]
    return [
        spec
        if dim is None
        else spec._replace(
            shape=tuple(n // len(devices) if i == dim else n for i, n in enumerate(spec.shape))
        )
        for spec, dim in operands
    ]


def shardings(call: Call, devices: np.ndarray | None) -> tuple[str, ...]:
    """Of operands, then of results, as XLA writes them: by heads, other dimensions replicated.

    Args:
        devices: from `by_heads`; None: all is replicated.
    """
    texts = []
    for spec, dim in call.arrays():
        if devices is None or dim is None:
            texts.append("{replicated}")
            continue
        num_parts, copies = devices.shape
        tiles = [num_parts if i == dim else 1 for i in range(len(spec.shape))]
        sizes = ",".join(map(str, [*tiles, copies]))
        numbers = ",".join(map(str, devices.flatten()))
        texts.append(f"{{devices=[{sizes}]{numbers} last_tile_dim_replicate}}")
    return tuple(texts)
