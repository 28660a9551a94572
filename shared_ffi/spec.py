"""What a checked call of an op is, and how a broken rule is worded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

STORAGE_DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Those of 8 bits, which a cache may have instead."""

Scalar = np.float32 | np.int64
"""An attribute's value. An int64 that follows from sizes is a symbol where they are."""


Smaller = Callable[[int, int], int]


class ArraySpec(NamedTuple):
    """Shape and dtype name (``"bfloat16"``) of an operand or a result."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    """In elements; None: dense, the last dimension first."""


@dataclass(frozen=True)
class Call:
    """A call that has passed its op's check: all that any door needs to make it.

    Hashable: two calls are equal exactly when they lower to the same custom call.
    """

    op: str
    target: str
    """Custom-call target, the same on every platform."""
    operands: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]
    attributes: tuple[tuple[str, Scalar], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    """Pairs (operand, result) that share one buffer: the op writes in place."""
    num_kv_heads: int = 0
    """Devices may share the call by kv heads, as many as divide this; 0: they may not."""
    head_dims: tuple[int | None, ...] = ()
    """For each operand, then each result: the dimension along which its heads lie, if it has one.
    A device with a part of the kv heads has that part of each of these dimensions."""
    cuda_scratch_bytes: Callable[[Call, Smaller], int] | None = None
    """How much memory the CUDA kernels need besides, if they do."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: caches look a call up each time that it is made."""
        return hash((self.target, self.operands, self.results, self.attributes))

    def arrays(self) -> list[tuple[ArraySpec, int | None]]:
        """Operands, then results, each with the dimension of its heads."""
        return [*zip((*self.operands, *self.results), self.head_dims, strict=True)]

    def results_on(self, platform: str, smaller: Smaller = min) -> tuple[ArraySpec, ...]:
        """What the handler of a platform ("cpu", "cuda") writes: the results, and on CUDA, where
        handlers allocate nothing, the scratch.

        Args:
            smaller: the smaller of two sizes, which may be symbols.
        """
        if platform != "cuda" or self.cuda_scratch_bytes is None:
            return self.results
        return (*self.results, ArraySpec((self.cuda_scratch_bytes(self, smaller),), "uint8"))


@dataclass
class Operands:
    """Of a call that is being checked, with what else it has of them."""

    specs: list[ArraySpec]
    head_dims: list[int | None]
    attributes: list[tuple[str, Scalar]]

    def add_feature(self, name: str, spec: ArraySpec, head_dim: int | None) -> None:
        """One more operand; an attribute with the feature's name has its number."""
        self.attributes.append((name, np.int64(len(self.specs))))
        self.specs.append(spec)
        self.head_dims.append(head_dim)


def shape_error(op: str, argument: str, rule: str, got: object) -> ValueError:
    """An argument has the wrong shape."""
    return ValueError(f"{op}: {argument} must have shape {rule}; got {_show(got)}")


def value_error(op: str, argument: str, rule: str, got: object) -> ValueError:
    """An argument has the wrong value."""
    return ValueError(f"{op}: {argument} must {rule}; got {_show(got)}")


def dtype_error(op: str, argument: str, rule: str, got: object) -> TypeError:
    """An argument has the wrong dtype or type."""
    return TypeError(f"{op}: {argument} must have {rule}; got {_show(got)}")


def on_host(array: Any) -> np.ndarray:
    """The values of an array of NumPy, JAX or PyTorch, wherever it lies; waits for them."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def _show(got: object) -> str:
    return str(list(got)) if isinstance(got, tuple) else str(got)
