"""Compares results: bit for bit with each other, within a reasoned bound with the oracle."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from harness import reference
from harness.arrays import unpacked
from harness.layouts import default
from shared_ffi import _native
from shared_ffi.kv_cache import are_of_groups

# The error of the float32 mathematics. A logit's rounding error is about head_size^0.5 * 2^-24
# times the size of its terms. The softmax passes it on to the weights. The weights and the weighted
# sum add some 2^-24 each. In the worst case, logits near 100, the total is 2e-5 times the size of
# the values, which is about 1.
_MATH = 2e-5

# The error of storing the result: half a unit in the last place, relative to the result.
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Compares two arrays, or two tuples of arrays."""
    if isinstance(expected, tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_same_bits(one, other)
        return
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    bits = f"u{actual.dtype.itemsize}"
    a, b = (np.ascontiguousarray(x).reshape(-1).view(bits) for x in (actual, expected))
    different = np.flatnonzero(a != b)
    if different.size:
        first = np.unravel_index(different[0], actual.shape)
        where = tuple(int(i) for i in first)
        raise AssertionError(
            f"{different.size} of {a.size} elements differ in their bits; the first, at {where}, "
            f"is {actual[first]!r}, expected {expected[first]!r}"
        )


def assert_close(
    actual: np.ndarray,
    oracle: np.ndarray,
    dtype: str,
    also_allowed: np.ndarray | float = 0.0,
    is_sum: np.ndarray | None = None,
) -> None:
    """Compares with the oracle's result, within the error of float32 and of rounding to `dtype`.

    Tokens that are zero in the oracle must be zero: they are padding. `is_sum` says which are not:
    their terms cancel.
    """
    assert actual.dtype.name == dtype, f"dtype {actual.dtype}, expected {dtype}"
    assert actual.shape == oracle.shape, f"shape {actual.shape}, expected {oracle.shape}"
    values = actual.astype(np.float64)
    is_wrong = np.isnan(values) != np.isnan(oracle)
    misplaced = np.argwhere(is_wrong | (np.isinf(oracle) & (values != oracle)))
    if misplaced.size:
        where = tuple(int(i) for i in misplaced[0])
        raise AssertionError(
            f"NaN or infinity in only one of the two at {len(misplaced)} of {values.size} "
            f"elements; the first, at {where}, is {values[where]}, expected {oracle[where]}"
        )
    error = np.abs(np.nan_to_num(values) - np.nan_to_num(oracle))
    allowed = _MATH + np.abs(np.nan_to_num(oracle)) * (_MATH + _ROUNDING[dtype])
    allowed += np.nan_to_num(also_allowed, posinf=0)  # what is infinite was compared above
    is_padding = ~oracle.any(axis=tuple(range(1, oracle.ndim)))
    allowed[is_padding if is_sum is None else is_padding & ~is_sum] = 0
    if (error > allowed).any():
        worst = np.unravel_index(np.argmax(error - allowed), error.shape)
        where = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{(error > allowed).sum()} of {error.size} elements are off; the worst, at {where}, "
            f"is {values[worst]}, expected {oracle[worst]}: error {error[worst]:.3g}, allowed "
            f"{allowed[worst]:.3g}"
        )


def assert_close_on_cpu(actual: Any, inputs: Any, attributes: dict[str, Any]) -> None:
    """Compares with the oracle's paged_attention, within the error of the CPU kernel in use."""
    Oracle(inputs, attributes).assert_close_on_cpu(actual)


def assert_close_on_cuda(actual: Any, inputs: Any, attributes: dict[str, Any]) -> None:
    """Compares with the oracle's paged_attention, within the error of the CUDA kernel that runs."""
    Oracle(inputs, attributes).assert_close_on_cuda(actual)


def _has_groups(scales: Any) -> bool:
    return scales is not None and are_of_groups(scales)


def has_products_of_16_bits(inputs: Any, attributes: dict[str, Any]) -> bool:
    """Whether a number of the cache times the scale of its group always has 16 bits. If so, tensor
    cores can multiply rows with scales of groups."""
    query, keys, *_ = inputs
    sides = [("k_scale", keys)]
    if "value_head_size" not in attributes:  # else V is a part of K
        sides.append(("v_scale", attributes.get("value_cache", keys)))
    for name, cache in sides:
        scales: Any = attributes.get(name)
        has_4_bits = cache.dtype.name in ("uint8", "float4_e2m1fn")
        if not _has_groups(scales):
            if not has_4_bits and cache.dtype != np.int8:
                return False
            continue
        row_size = unpacked(cache).shape[-1] if cache is not keys else query.shape[-1]
        dtypes = ["float8_e4m3fn", "float8_e8m0fnu"]
        if name == "k_scale" and query.dtype == np.float16:  # K has the type of the query
            dtypes = dtypes[:1]
        is_small = has_4_bits and scales.dtype.name in dtypes
        size = row_size // scales.shape[3]
        if not is_small or size % 16 != 0 or size & (size - 1) != 0:
            return False
    return True


class Oracle:
    """The oracle's result of a call of paged_attention, computed once for several comparisons."""

    def __init__(self, inputs: Any, attributes: dict[str, Any]) -> None:
        """`inputs` and `attributes`: those of the call, which keep their values."""
        self._query, kv_cache, *self._metadata = inputs
        self._with_lse = attributes | {"return_lse": True}
        self._returns_lse = bool(attributes.get("return_lse"))
        value_cache = self._with_lse.pop("value_cache", None)
        caches = [x for x in (kv_cache, value_cache) if x is not None]
        kv_layout, columns = (self._with_lse.pop(x, None) for x in ("kv_layout", "value_head_size"))
        codes = self._with_lse.pop("codes", None)
        values = self._query if value_cache is None else unpacked(value_cache, codes)
        self._columns = columns or values.shape[-1]
        self._is_latent = columns is not None
        self._kv_cache = default(caches, kv_layout, is_latent=columns is not None, codes=codes)
        v_scale = attributes.get("v_scale")
        if value_cache is not None and v_scale is not None and v_scale.ndim == 4:
            # As those of rows as long as those of K, to which `default` has filled them up.
            groups = v_scale.shape[3] * self._query.shape[2] // self._columns
            more = ((0, 0), (0, 0), (0, 0), (0, groups - v_scale.shape[3]))
            self._with_lse["v_scale"] = np.pad(v_scale.astype(np.float32), more)
        if columns is not None:
            of_keys = {name: x for name, x in attributes.items() if name in ("k_scale", "k_global")}
            self._with_lse |= {f"v{name[1:]}": x for name, x in of_keys.items()}
        self._has_codes = codes is not None or any(
            _has_groups(attributes.get(name)) for name in ("k_scale", "v_scale")
        )
        self._multiplies_rows = self._has_codes and not has_products_of_16_bits(inputs, attributes)
        self._output, self._lse = self._attend(self._kv_cache)

    def _attend(self, kv_cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        result: tuple[np.ndarray, np.ndarray] = reference.paged_attention(
            self._query, kv_cache, *self._metadata, **self._with_lse
        )
        return result[0][..., : self._columns], result[1]

    @cached_property
    def _sizes(self) -> np.ndarray:
        """The weighted sums of absolute values."""
        kv_cache = self._kv_cache.astype(np.float64)
        kv_cache[:, :, 1::2] = np.abs(kv_cache[:, :, 1::2])
        return self._attend(kv_cache)[0]

    def assert_close_on_cpu(self, actual: Any) -> None:
        """Compares within the error of the CPU kernel in use."""
        is_bfloat16 = self._query.dtype.name == "bfloat16"
        rounds_weights = is_bfloat16 and _native.cpu_instruction_set() == "avx512_bf16"
        self._assert_close(actual, "bfloat16" if rounds_weights else None)

    def assert_close_on_cuda(self, actual: Any) -> None:
        """Compares within the error of the CUDA kernel that runs."""
        query, cache, head_size = self._query.dtype, self._kv_cache.dtype, self._query.shape[2]
        largest = (576 if self._is_latent else 512) if cache == query else 256
        unit = 16 if self._has_codes else 16 // cache.itemsize
        on_tensor_cores = (
            query.itemsize == 2
            and not self._multiplies_rows
            and head_size <= largest
            and self._columns <= 512
            and all(size % unit == 0 for size in (head_size, self._columns))
        )
        weights = query.name if cache == query else "bfloat16"
        self._assert_close(actual, weights if on_tensor_cores else None)

    def _assert_close(self, actual: Any, weights: str | None) -> None:
        """`weights`: the dtype that the kernel rounds the softmax's weights to, None if it does
        not. Rounded weights change a row by at most the rounding error times the weighted sum of
        absolute values."""
        rounding = _ROUNDING[weights] if weights else 0.0
        output, lse = actual if self._returns_lse else (actual, None)
        also_allowed = rounding * self._sizes if weights else 0.0
        is_off = (output != 0).any(axis=(1, 2)) & ~self._output.any(axis=(1, 2))
        is_sum = np.asarray(self._sizes.any(axis=(1, 2)) if is_off.any() else False)
        assert_close(output, self._output, self._query.dtype.name, also_allowed, is_sum)
        if lse is not None:
            assert_close(lse, self._lse, "float32", rounding)


def max_error(actual: np.ndarray, oracle: np.ndarray) -> float:
    """The largest absolute difference; infinite where only one of the two is NaN."""
    difference = np.abs(actual.astype(np.float64) - oracle)
    difference[np.isnan(actual) & np.isnan(oracle)] = 0
    return float(np.max(np.nan_to_num(difference, nan=np.inf, posinf=np.inf), initial=0.0))
