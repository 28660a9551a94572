"""The CPU kernels' vector functions: as exact as they say, for each instruction set."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from shared_ffi import _native
from tests import native

FLAGS = {
    "avx512_bf16": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c",
    "avx2": "-mavx2 -mfma -mf16c",
    "baseline": "",
}

SOURCE = """
#include "simd.h"
using namespace xla_gpu;

struct Same {
  Lanes operator()(Lanes x) const { return x; }
};

template <typename From, typename To, typename Function = Same>
static void ForEach(const From* x, To* y, long n, Function function = {}) {
  for (long i = 0; i < n; i += kLanes) StoreNarrow(function(LoadWide(x + i, n - i)), y + i, n - i);
}

extern "C" {
void Exp2(const float* x, float* y, long n) {
  ForEach(x, y, n, [](Lanes x) { return Exp2OfNonPositive(x); });
}
void Tanh(const float* x, float* y, long n) {
  ForEach(x, y, n, [](Lanes x) { return xla_gpu::Tanh(x); });
}
void FromBFloat16(const BFloat16* x, float* y, long n) { ForEach(x, y, n); }
void FromHalf(const Half* x, float* y, long n) { ForEach(x, y, n); }
void ToBFloat16(const float* x, BFloat16* y, long n) { ForEach(x, y, n); }
void ToHalf(const float* x, Half* y, long n) { ForEach(x, y, n); }
}
"""

Call = Callable[..., np.ndarray]


@pytest.fixture(scope="module", params=_native.cpu_instruction_sets())
def simd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """simd(name, x, dtype): what a function of SOURCE makes of x."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "simd.cc").write_text(SOURCE)
    outcome = native.run(
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-ffp-contract=off"),
        *(*FLAGS[request.param].split(), "-I", native.ROOT / "shared_ffi/csrc", "-shared", "-fPIC"),
        *(folder / "simd.cc", "-o", folder / "simd.so"),
    )
    assert outcome.returncode == 0, outcome.stdout
    library = ctypes.CDLL(str(folder / "simd.so"))

    def call(name: str, x: np.ndarray, dtype: type = np.float32) -> np.ndarray:
        x, y = np.ascontiguousarray(x), np.empty(x.size, dtype)
        function = getattr(library, name)
        function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), x.size)
        return y

    return call


def test_exp2_within_2_ulp(simd: Call) -> None:
    x = np.linspace(-126, 0, 2_000_003, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32))
    assert np.max(np.abs(simd("Exp2", x) - exact) / ulp) <= 2
    special = np.array([0, -0.0, -1, -126, -126.5, -1e30, -np.inf, np.nan], np.float32)
    expected = np.array([1, 1, 0.5, 2.0**-126, 0, 0, 0, np.nan], np.float32)
    np.testing.assert_array_equal(simd("Exp2", special), expected)


def test_tanh_within_2_to_the_minus_23(simd: Call) -> None:
    x = np.concatenate([np.linspace(-20, 20, 1_000_001), [0, np.inf, -np.inf]]).astype(np.float32)
    assert np.max(np.abs(simd("Tanh", x) - np.tanh(x.astype(np.float64)))) <= 2**-23
    assert np.isnan(simd("Tanh", np.array([np.nan], np.float32)))[0]


@pytest.mark.parametrize(
    ("name", "dtype"), [("BFloat16", ml_dtypes.bfloat16), ("Half", np.float16)]
)
def test_conversions(simd: Call, name: str, dtype: type) -> None:
    """All numbers of a type there and back, and every kind of rounding."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = simd(f"From{name}", every)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    back = simd(f"To{name}", wide, dtype)
    np.testing.assert_array_equal(back.astype(np.float32), every.astype(np.float32))

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1_000_001, dtype=np.uint32)
    ties = (bits[:100_000] & 0xFFFF0000) | 0x8000  # halfway between two bfloat16
    with np.errstate(over="ignore", invalid="ignore"):
        near = every.astype(np.float32) * np.float32(1 + 2**-12)
        x = np.concatenate([bits.view(np.float32), ties.view(np.float32), near])
        expected = x.astype(dtype)
    np.testing.assert_array_equal(
        simd(f"To{name}", x, dtype).astype(np.float32), expected.astype(np.float32)
    )
