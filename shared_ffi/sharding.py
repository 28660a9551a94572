"""How devices share a call: each has a part of the kv heads and of the cache, and sends nothing.
Where there is one kv head, each has a part of the query heads and all of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared_ffi.spec import ArraySpec, Call


def by_heads(call: Call, devices: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Finds the first array that is sharded by heads.

    Args:
        call: the call on whole arrays.
        devices: for each of the first arrays of the call, operands before results, the devices that
            have each tile, in an array whose first dimensions are those of the operand; None where
            this is not known or where the array is not tiled.

    Returns:
        ``[num_parts, copies]``: the devices that have each part of the heads; None if no array
        is sharded by heads.
    """
    for tiles, dim in zip(devices, call.head_dims, strict=False):
        if tiles is None or dim is None:
            continue
        num_parts = tiles.shape[dim]
        if num_parts > 1 and call.num_shared_heads % num_parts == 0:
            return np.moveaxis(tiles, dim, 0).reshape(num_parts, -1)
    return None


def parts(call: Call, devices: np.ndarray) -> list[ArraySpec]:
    """The part of each operand that a device has.

    Args:
        call: the call on whole arrays.
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
    """The shardings of operands, then of results, as XLA writes them: only heads are sharded.

    Args:
        call: the call on whole arrays.
        devices: from `by_heads`; None: everything is replicated.
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
