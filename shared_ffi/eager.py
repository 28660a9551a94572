"""Calls a handler directly, with no XLA runtime: what an eager framework does on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shared_ffi import _native
from shared_ffi.spec import Call


def run(call: Call, operands: Sequence[Any], results: Sequence[Any], num_threads: int) -> None:
    """Runs a checked call on contiguous CPU arrays, without copies.

    Args:
        call: what the op's check returned for these operands.
        operands: the inputs, in the op's order, as anything that speaks DLPack, or its capsules.
        results: arrays to write into; for an aliased result, the operand itself.
        num_threads: most threads to use, the calling one included.

    Raises:
        ValueError: the handler found fault with the values, such as a block id out of range.
    """
    _prepare(call)(operands, results, num_threads)


@lru_cache(maxsize=4096)
def _prepare(call: Call) -> _native.EagerCall:
    attributes = {name: value.item() for name, value in call.attributes}
    return _native.EagerCall(_native.handlers()["cpu"][call.target], attributes)
