"""From JAX arrays to a checked call, and from the call to its results."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_frontend._differentiation import without_derivative
from jax_frontend._sharding import with_partition_rules
from jax_frontend._vmap.batching import Batch, Operand, Results, with_vmap_rule
from shared_ffi.spec import (
    ArraySpec,
    Call,
    dtype_error,
    missing_error,
    on_host,
    value_error,
)

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def run(
    check: Callable[..., Call],
    arrays: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    batch: Batch | None = None,
) -> Results:
    """Checks a call of an op and makes it.

    Args:
        check: the op's check in shared_ffi, which takes all arguments by name.
        arrays: the op's array arguments by name, in the order of the operands; None: not given.
        options: the other arguments by name.
        batch: how ``jax.vmap`` makes one call of many; None: it loops over them.
    """
    op, required = _required(check)
    for name in required.intersection(arrays):
        if arrays[name] is None:
            raise missing_error(op, name)
    for name, array in arrays.items():
        _check_integers_fit(op, name, array)
    given = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
    arguments = Arguments(check, (*given,), (*(options or {}).items(),), batch)
    call = arguments.checked(*given.values())
    return _function(arguments, call)(*given.values())


def takes_arrays(
    op: str,
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """For a function that looks at its arrays, which come first, before an op's check does.

    It raises TypeError if one is no array, or is None and may not be; and ValueError for integers
    that JAX would truncate.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        parameters = inspect.signature(function).parameters
        arrays = {
            name: x.annotation
            for name, x in parameters.items()
            if x.kind is x.POSITIONAL_OR_KEYWORD
        }

        @wraps(function)
        def checked(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Returned:
            given = dict(zip(parameters, arguments, strict=False)) | keywords
            for name, annotation in arrays.items():
                if name not in given:
                    continue
                array = given[name]
                if array is None and not annotation.endswith("| None"):
                    raise missing_error(op, name)
                if annotation == "jax.Array" and not hasattr(array, "shape"):
                    raise dtype_error(op, name, "type array", type(array).__name__)
                _check_integers_fit(op, name, array)
            return function(*arguments, **keywords)

        return checked

    return decorate


@lru_cache
def _required(check: Callable[..., Call]) -> tuple[str, frozenset[str]]:
    """The op of a check, and the arguments that it cannot do without."""
    parameters = inspect.signature(check).parameters.values()
    required = frozenset(x.name for x in parameters if x.default is x.empty)
    return sys.modules[check.__module__].OP, required


def _check_integers_fit(op: str, name: str, given: Any) -> None:
    """JAX makes 32-bit integers of 64-bit ones and drops the upper bits without a word: of all
    arrays but its own, which it has truncated before."""
    if isinstance(given, jax.Array):
        return
    for array in jax.tree.leaves(given):  # of a list, or the array itself
        is_jax = isinstance(array, jax.Array) or not hasattr(array, "__array__")
        if is_jax or "int64" not in str(getattr(array, "dtype", "int64")):
            continue
        values = np.ravel(on_host(array))
        if values.dtype.kind not in "iu":
            continue
        dtype = jax.dtypes.canonicalize_dtype(values.dtype)
        limits = np.iinfo(dtype)
        lost = values[(values < limits.min) | (values > limits.max)]
        if lost.size > 0:
            rule = f"hold integers that fit {dtype.name}, as jax_enable_x64 is off"
            raise value_error(op, name, rule, lost[0])


@dataclass(frozen=True)
class Arguments:
    """The arguments of `run`, with the names of the arrays in place of the arrays. Hashable."""

    check: Callable[..., Call]
    array_names: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    batch: Batch | None

    def checked(self, *arrays: jax.Array) -> Call:
        """Checks the call on these arrays, or on a device's parts of them."""
        specs = [ArraySpec(array.shape, array.dtype.name) for array in arrays]
        return self.check(**dict(zip(self.array_names, specs, strict=True)), **dict(self.options))


@lru_cache(maxsize=4096)
def _function(arguments: Arguments, call: Call) -> Callable[..., Results]:
    """The function of arrays that makes a call, with its rules for JAX's transformations.

    Equal calls get the same function, so that JAX finds what it has compiled.
    """
    function = with_partition_rules(call, arguments.checked)
    function = with_vmap_rule(function, partial(_run_batched, arguments))
    function = without_derivative(call.op, function)
    return jax.jit(function, inline=True)


def _run_batched(arguments: Arguments, size: int, operands: Sequence[Operand]) -> Results | None:
    """Makes the calls under ``jax.vmap`` as one call; returns None if the op cannot."""
    if arguments.batch is None:
        return None
    by_name = dict(zip(arguments.array_names, operands, strict=True))
    options = dict(arguments.options)
    batched = arguments.batch(size, by_name, options)
    if batched is None:
        return None
    arrays = {name: batched.arrays[name] for name in arguments.array_names}
    results = run(arguments.check, arrays, options | batched.options, arguments.batch)
    return tuple(map(batched.unbatch, results))
