"""How devices share a call: each has a part of the kv heads and of the cache, and sends nothing.
Where there is one kv head, each has a part of the query heads and all of the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shared_ffi.spec import ArraySpec, Call, value_error

Axes = tuple[str, ...]
"""The mesh axes that a dimension is sharded along; empty: it is not sharded."""


def by_heads(call: Call, devices: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Finds the first array that is sharded by heads.

    Args:
        call: the call on whole arrays.
        devices: for each of the first arrays of the call, operands before results, the devices that
            have each tile, in an array whose first dimensions are those of the operand; None where
            this is not known or where the array is not tiled.

    Returns:
        ``[num_parts, copies]``: the devices that have each part of the heads; None if no array
        is sharded by heads, or if devices would have to add up results.
    """
    if call.summed:
        return None
    for tiles, dim in zip(devices, call.head_dims, strict=False):
        if tiles is None or dim is None or not call.num_shared_heads:
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


def shardy_rule(call: Call, results: Sequence[ArraySpec]) -> str | None:
    """The call's rule for Shardy, as MLIR writes it: dimensions of heads share a factor, all others
    are replicated. None: devices cannot share the call, or a size is a symbol.

    Args:
        call: the call on whole arrays.
        results: all that the custom call returns; scratch comes last.
    """
    arrays = [*call.operands, *results]
    is_shared = call.num_shared_heads and not call.summed
    if not is_shared or not all(isinstance(n, int) for x in arrays for n in x.shape):
        return None
    head_dims = [*call.head_dims, *[None] * (len(arrays) - len(call.head_dims))]
    sizes: dict[str, int] = {}
    shared, replicated, mappings = "", [], []

    def factor(size: int) -> str:
        letters = "ijklmnopqrstuvwxyz"
        number = len(sizes)
        name = letters[number] if number < len(letters) else f"z_{number - len(letters) + 1}"
        sizes[name] = size
        return name

    for spec, head_dim in zip(arrays, head_dims, strict=True):
        dims = []
        for dim, size in enumerate(spec.shape):
            if dim != head_dim:
                dims.append(factor(size))
                replicated.append(dims[-1])
                continue
            shared = shared or factor(call.num_shared_heads)
            copies = size // call.num_shared_heads
            dims.append(shared + factor(copies) if copies > 1 else shared)
        mappings.append(f"[{', '.join(dims)}]")
    count = len(call.operands)
    before, after = ", ".join(mappings[:count]), ", ".join(mappings[count:])
    factors = ", ".join(f"{name}={size}" for name, size in sizes.items())
    alone = f" need_replication={{{', '.join(replicated)}}}" if replicated else ""
    return f"#sdy.op_sharding_rule<({before})->({after}) {{{factors}}}{alone}, custom>"


def result_specs(
    call: Call,
    operands: Sequence[Sequence[Axes]],
    sizes: Mapping[str, int],
    remedy: str,
    show: Callable[[Sequence[Axes]], str],
) -> list[list[Axes]]:
    """The shardings of the results, where nothing may be moved between devices.

    Args:
        call: the call on whole arrays.
        operands: for each operand, the axes of each dimension.
        sizes: of the mesh axes.
        remedy: for messages, a sentence: how the framework moves an array.
        show: for messages: an operand's sharding in the framework's words.

    Raises:
        ValueError: an operand is sharded along a dimension that devices cannot share, or the heads
            of two operands are sharded along different axes.
    """
    names = call.names
    head_dims = call.head_dims or (None,) * (len(names) + len(call.results))
    axes: Axes = ()
    for name, dims, head_dim in zip(names, operands, head_dims, strict=False):
        for dim, given in enumerate(dims):
            if not given:
                continue
            if not call.num_shared_heads or head_dim is None:
                raise value_error(call.op, name, "be replicated", show(dims), remedy)
            if dim != head_dim:
                rule = f"be sharded along dimension {head_dim} alone, its heads"
                raise value_error(call.op, name, rule, show(dims), remedy)
            num_parts = math.prod(sizes[axis] for axis in given)
            if call.num_shared_heads % num_parts != 0:
                rule = f"be sharded over a number of devices that divides {call.num_shared_heads}"
                got = f"{show(dims)}, which is {num_parts} devices"
                raise value_error(call.op, name, f"{rule} heads", got, remedy)
            if axes and given != axes:
                rule = f"be sharded along the mesh axes of the other operands' heads, {list(axes)}"
                raise value_error(call.op, name, rule, show(dims), remedy)
            axes = given
    for operand, _ in call.aliases:
        head_dim = head_dims[operand]
        if axes and head_dim is not None and not operands[operand][head_dim]:
            rule = f"be sharded along dimension {head_dim} by {list(axes)}, as other heads are"
            raise value_error(call.op, names[operand], rule, show(operands[operand]), remedy)
    return [
        [axes if dim == head_dim else () for dim in range(len(spec.shape))]
        for spec, head_dim in zip(call.results, head_dims[len(names) :], strict=True)
    ]
