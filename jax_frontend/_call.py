"""From JAX arrays to a checked call, and from the call to its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from shared_ffi.spec import ArraySpec, Call, dtype_error, missing_error, on_host, value_error
from shared_ffi.xla import lowering, runtimes

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class Arrays:
    """The arrays of a call by name. Each method adds one and returns its shape and dtype for the
    op's check."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._arrays: dict[str, jax.Array] = {}

    def add(self, name: str, array: Any) -> ArraySpec:
        """Adds an array of any dtype, or what JAX makes an array of."""
        return self._add(name, self._given(name, array))

    def add_int32(self, name: str, array: Any) -> ArraySpec:
        """Adds integers. Under ``jax_enable_x64`` they may have 64 bits: a number beyond int32
        becomes the int32 that is nearest to it, which is out of every range as well."""
        array = self._given(name, array)
        if array.dtype == jnp.int64:
            limits = jnp.iinfo(jnp.int32)
            array = jnp.clip(array, limits.min, limits.max).astype(jnp.int32)
        return self._add(name, array)

    def add_optional(self, name: str, array: Any) -> ArraySpec | None:
        """Adds an array of any dtype, if there is one."""
        return None if array is None else self.add(name, array)

    def add_optional_float32(self, name: str, array: Any) -> ArraySpec | None:
        """Adds floating-point numbers, if there are any. Under ``jax_enable_x64`` they may have
        64 bits, and are rounded."""
        if array is None:
            return None
        array = self._given(name, array)
        return self._add(name, array.astype(jnp.float32) if array.dtype == jnp.float64 else array)

    def add_optional_int32(self, name: str, array: Any) -> ArraySpec | None:
        """Adds integers, if there are any; see add_int32."""
        return None if array is None else self.add_int32(name, array)

    def add_optional_words(self, name: str, array: Any) -> ArraySpec | None:
        """Adds words of 32 bits, if there are any. Under ``jax_enable_x64`` they may be integers of
        64 bits, of which the lower 32 count."""
        if array is None:
            return None
        array = self._given(name, array)
        return self._add(name, array.astype(jnp.int32) if array.dtype == jnp.int64 else array)

    def add_flags(self, name: str, flags: Any) -> Any:
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
        check_integers_fit(self._op, name, array)
        return array if isinstance(array, jax.Array) else jnp.asarray(array)

    def _add(self, name: str, array: jax.Array) -> ArraySpec:
        self._arrays[name] = array
        return ArraySpec(array.shape, _name(array.dtype))

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self._arrays.values())

    def by_name(self) -> dict[str, jax.Array]:
        """The arrays so far."""
        return dict(self._arrays)

    def call(self, call: Call) -> tuple[jax.Array, ...]:
        """Makes a checked call with these arrays."""
        return _function(call)(*[self._arrays[name] for name in call.names])


_name = lru_cache(attrgetter("name"))  # NumPy makes it of a dtype each time


@lru_cache(maxsize=4096)
def _function(call: Call) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of arrays that makes a call. Equal calls get the same one, so that JAX finds
    what it has compiled."""
    runtimes.register()
    return jax.jit(partial(lowering.make, call), inline=True)


def _refuse_derivative(primals: Any, tangents: Any, *, call: Call) -> Any:
    """The rule for ``jax.grad`` and its kin."""
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
            raise value_error(op, name, rule, lost[0])
