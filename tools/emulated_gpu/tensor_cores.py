"""The sums of tensor cores in whole numbers, from what MMA-Sim (arXiv 2511.10909) publishes:
its authors compared that with GPUs. It shares nothing with the emulated GPU."""

from __future__ import annotations

import numpy as np

# By the type of the operands: bits of a product's significand behind its first two, and the
# exponent of the smallest normal number.
TYPES = {"float16": (20, -14), "bfloat16": (14, -126)}


def _parts(x: np.ndarray, digits: int, lowest: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, and exponents: x = number * 2^(exponent - digits)."""
    exponents = np.where(x == 0, lowest, np.maximum(np.frexp(x)[1] - 1, lowest)).astype(np.int64)
    return np.ldexp(x.astype(np.float64), digits - exponents).astype(np.int64), exponents


def _shifted(numbers: np.ndarray, by: np.ndarray) -> np.ndarray:
    """numbers * 2^by, truncated."""
    magnitudes = np.abs(numbers) << np.clip(by, 0, 30) >> np.clip(-by, 0, 62)
    return np.sign(numbers) * magnitudes


def _fused(c: np.ndarray, a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    digits, lowest = TYPES[a.dtype.name]
    with np.errstate(invalid="ignore"):
        a, b = a.astype(np.float32), b.astype(np.float32)
        plain = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    a, b, c = (np.where(np.isfinite(x), x, 0) for x in (a, b, c))
    left, left_exponents = _parts(a, digits // 2, lowest)
    right, right_exponents = _parts(b, digits // 2, lowest)
    own, own_exponents = _parts(c, 23, -126)
    products = left[:, :, None] * right
    exponents = left_exponents[:, :, None] + right_exponents
    exponents = np.where(products == 0, -126, exponents)
    top = np.maximum(exponents.max(axis=1), own_exponents)
    unit = top - bits
    terms = _shifted(products, exponents - digits - unit[:, None])
    total = terms.sum(axis=1) + _shifted(own, own_exponents - 23 - unit)
    # To 24 bits, or to the smallest that a float can have, towards zero.
    excess = np.maximum(np.frexp(np.abs(total).astype(np.float64))[1] - 24, -149 - unit)
    excess = np.maximum(excess, 0)
    total = np.sign(total) * (np.abs(total) >> excess << excess)
    with np.errstate(over="ignore"):
        result = np.ldexp(total.astype(np.float64), unit).astype(np.float32)
    result = np.where(np.isinf(plain), plain, result).astype(np.float32)
    return np.where(np.isnan(plain), np.uint32(0x7FFFFFFF).view(np.float32), result)


def add_products(c: np.ndarray, a: np.ndarray, b: np.ndarray, capability: int) -> np.ndarray:
    """c + a b as a chain of products of 16 columns of a: float32 [m, n], [m, k] and [k, n] of 16
    bits."""
    terms, bits = (8, 24) if capability < 90 else (16, 25)
    for k in range(0, a.shape[1], terms):
        c = _fused(c, a[:, k : k + terms], b[k : k + terms], bits)
    return c
