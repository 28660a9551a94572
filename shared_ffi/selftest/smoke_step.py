"""The smallest decoding step, which shows whether the ops run. ``python -m shared_ffi`` takes it
through every backend, with the ``_try.py`` of the frontends.

A sequence of two tokens: the update writes their K and V into block 1, then one query attends to
them. K is zero, so both V, 1 and 3, have the same weight, and every element of the result is 2.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SCALE = 1.0


def operands() -> list[np.ndarray]:
    """The cache, key, value and slots of the update, then the query and its metadata."""
    value = np.ones((2, 1, 8), np.float32)
    value[1] = 3
    update = [np.zeros((2, 2, 2, 8), np.float32), np.zeros((2, 1, 8), np.float32), value]
    metadata = [np.array(x, np.int32) for x in ([2], [[1]], [0, 1], [1])]
    return [*update, np.array([2, 3], np.int32), np.ones((1, 1, 8), np.float32), *metadata]


def check(output: Iterable[float]) -> None:
    """Raises ArithmeticError if the elements of the result are wrong."""
    values = sorted({*map(float, output)})
    if values != [2.0]:
        raise ArithmeticError(f"every element of the result must be 2; got {values}")
