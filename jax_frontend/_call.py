"""From JAX arrays to a checked call, and from the call to its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from shared_ffi import varlen_attention, varlen_attention_backward
from shared_ffi.spec import (
    ArraySpec,
    Call,
    array_error,
    dtype_error,
    missing_error,
    on_host,
    value_error,
)
from shared_ffi.xla import lowering, runtimes

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def _int32(array: jax.Array) -> jax.Array:
    """Integers of 32 or 64 bits. One beyond int32 becomes the int32 that is nearest to it, which is
    out of every range as well."""
    if array.dtype != jnp.int64:
        return array
    limits = jnp.iinfo(jnp.int32)
    return jnp.clip(array, limits.min, limits.max).astype(jnp.int32)


def _words(array: jax.Array) -> jax.Array:
    """Words of 32 bits. An integer of 64 bits gives its lower 32."""
    return array.astype(jnp.int32) if array.dtype == jnp.int64 else array


def _float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if array.dtype == jnp.float64 else array


@lru_cache(maxsize=64)
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function)


def _may_be_none(hint: Any) -> bool:
    return type(None) in get_args(hint)


class Arrays:
    """Reads the arrays of a call for its check, and keeps them by name. Each of its functions for
    that takes arrays by name, and returns the shape and dtype of each.

    Args:
        op: the public function, for messages.
        check: its type hints say which arrays may be None, and which a bool.
    """

    def __init__(self, op: str, check: Callable[..., Any]) -> None:
        self._op = op
        self._hints = _hints(check)
        self._arrays: dict[str, jax.Array] = {}

    def read(self, **arrays: Any) -> dict[str, Any]:
        """Reads arrays of any dtype."""
        return self._read(arrays, lambda array: array)

    def int32(self, **arrays: Any) -> dict[str, Any]:
        """Reads integers."""
        return self._read(arrays, _int32)

    def words(self, **arrays: Any) -> dict[str, Any]:
        """Reads words of 32 bits."""
        return self._read(arrays, _words)

    def float32(self, **arrays: Any) -> dict[str, Any]:
        """Reads floating-point numbers."""
        return self._read(arrays, _float32)

    def _read(
        self, arrays: Mapping[str, Any], convert: Callable[[jax.Array], jax.Array]
    ) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for name, array in arrays.items():
            hint = self._hints.get(name, ArraySpec)
            if bool in get_args(hint):
                read[name] = self._add_flags(name, array)
            elif array is None and _may_be_none(hint):
                read[name] = None
            else:
                read[name] = self._add(name, convert(self._given(name, array)))
        return read

    def _add_flags(self, name: str, flags: Any) -> Any:
        """Adds booleans, or integers of which only 0 stands for False. What is neither an array nor
        a list of them is returned as it is, for the op's check."""
        is_list = isinstance(flags, list | tuple)
        if not is_list and (isinstance(flags, np.bool_) or not hasattr(flags, "shape")):
            return flags
        array = self._given(name, flags)
        is_int32 = array.dtype == jnp.int32 or array.dtype.kind not in "biu"
        return self._add(name, array if is_int32 else (array != 0).astype(jnp.int32))

    def _given(self, name: str, array: Any) -> jax.Array:
        """The array, which may not be None or hold integers that JAX would truncate."""
        if array is None:
            raise missing_error(self._op, name)
        if name == "kv_cache" and isinstance(array, list | tuple):
            got = f"a {type(array).__name__} of {len(array)}"
            remedy = "The first of what kv_cache_update returns is the cache"
            remedy += ". K and V apart are kv_cache and value_cache"
            raise array_error(self._op, name, got, remedy)
        check_integers_fit(self._op, name, array)
        if isinstance(array, jax.Array):
            return array
        try:
            return jnp.asarray(array)
        except (TypeError, ValueError):  # in JAX's words, which name neither op nor argument
            got = f"type {type(array).__name__}"
        is_list = isinstance(array, list | tuple)
        remedy = "Its rows must have one length" if is_list else "Pass numbers"
        raise array_error(self._op, name, got, remedy)

    def _add(self, name: str, array: jax.Array) -> ArraySpec:
        self._arrays[name] = array
        return ArraySpec(array.shape, _name(array.dtype))

    def by_name(self) -> dict[str, jax.Array]:
        """The arrays so far."""
        return dict(self._arrays)

    def call(self, call: Call) -> tuple[jax.Array, ...]:
        """Makes a checked call with these arrays."""
        return _function(call)(*[self._arrays[name] for name in call.names])


def make(
    op: str,
    check: Callable[..., Call],
    operands: Mapping[str, jax.Array],
    options: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Checks and makes a call with these arrays and other arguments."""
    arrays = Arrays(op, check)
    return arrays.call(check(**arrays.read(**operands), **options))


_name = lru_cache(attrgetter("name"))  # NumPy makes it of a dtype each time


@lru_cache(maxsize=4096)
def _function(call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of arrays that makes a call. Equal calls get the same one, so that JAX finds
    what it has compiled."""
    runtimes.register()
    return jax.jit(partial(lowering.make, call), inline=True)


def _refuse_derivative(primals: Any, tangents: Any, *, call: Call) -> Any:
    """The rule for ``jax.grad`` and its kin."""
    if call.op in (varlen_attention.OP, varlen_attention_backward.OP):
        raise varlen_attention.second_derivative_error()
    raise NotImplementedError(
        f"{call.op}: inference only, it has no derivative; got a call under jax.grad, jax.jvp "
        "or jax.linearize. Wrap the operands in jax.lax.stop_gradient; to train, call "
        "varlen_attention"
    )


ad.primitive_jvps[lowering.call_p] = _refuse_derivative


def takes_arrays(
    op: str,
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Decorator: checks the leading array arguments of a function before its body uses them.

    It raises TypeError if one is no array, or is None and may not be; and ValueError for integers
    that JAX would truncate.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        parameters = inspect.signature(function).parameters
        arrays = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]

        @wraps(function)
        def checked(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Returned:
            given = dict(zip(parameters, arguments, strict=False)) | keywords
            hints = _hints(function)
            for name in arrays:
                if name not in given:
                    continue
                array, hint = given[name], hints[name]
                if array is None and not _may_be_none(hint):
                    raise missing_error(op, name)
                if hint is jax.Array and not hasattr(array, "shape"):
                    remedy = f"Pass jax.numpy.asarray({name})"
                    raise dtype_error(op, name, "type array", type(array).__name__, remedy)
                check_integers_fit(op, name, array)
            return function(*arguments, **keywords)

        return checked

    return decorate


def check_integers_fit(op: str, name: str, given: Any) -> None:
    """JAX makes 32-bit integers of 64-bit ones and truncates silently. JAX's own arrays are
    already 32-bit, so only others are checked."""
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
            remedy = "Correct it, or turn jax_enable_x64 on"
            raise value_error(op, name, rule, lost[0], remedy)
