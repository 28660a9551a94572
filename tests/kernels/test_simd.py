"""The accuracy of the CPU kernels' vector functions, for each instruction set, and what the kernels
prefetch."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from harness.arrays import CACHE_DTYPES, quantized
from shared_ffi import _native
from tests.support import native
from tests.support.aarch64.program import INCLUDED, compile_program, run_program


def flags_of(instruction_set: str) -> list[str]:
    """The compiler's options for an instruction set, from cmake/cpu.cmake."""
    cmake = (native.ROOT / "cmake/cpu.cmake").read_text()
    flags = dict(re.findall(r"set\(CPU_FLAGS_(\w+) (.*)\)", cmake)).get(instruction_set, "")
    found = re.fullmatch(r"(?:\$\{CPU_FLAGS_(\w+)\})?(.*)", flags)
    assert found is not None
    return [*(flags_of(found[1]) if found[1] else []), *found[2].split()]


SOURCE = """
#include "simd/simd.h"
using namespace xla_gpu;

struct Same {
  Lanes operator()(Lanes x) const { return x; }
};

template <typename From, typename To, typename Function = Same>
static void ForEach(const From* x, To* y, long n, Function function = {}) {
  for (long i = 0; i < n; i += kLanes) StoreNarrow(function(LoadWide(x + i, n - i)), y + i, n - i);
}

template <typename To>
static void Round(const float* x, To* y, long n) {
  for (long i = 0; i < n; ++i) FromFloat(x[i], y + i);
}

#ifdef XLA_GPU_PAIRS_BYTES
using E4M3 = PairedFloat8E4M3;
using E5M2 = PairedFloat8E5M2;
using Int8 = PairedInt8;

template <typename T>
static void ToBFloat16s(const void* x, BFloat16* y, long n) {
  constexpr int kColumns = Dot<T>::kDown * kLanes;
  for (long i = 0; i < n; i += kColumns) {
    const T* row = static_cast<const T*>(x) + i;
    Lanes columns[Dot<T>::kDown];
    BFloat16 pairs[2 * kColumns];
    Dot<T>::LoadDown({row, row}, n - i, columns);
    StoreInOrder(columns, reinterpret_cast<float*>(pairs));
    for (long d = 0; d < kColumns && d < n - i; ++d) y[i + d] = pairs[2 * d + d % 2];
  }
}
#else
using E4M3 = Float8E4M3;
using E5M2 = Float8E5M2;
using Int8 = int8_t;

template <typename T>
static void ToBFloat16s(const void* x, BFloat16* y, long n) {
  ForEach(static_cast<const T*>(x), y, n);
}
#endif

void Exp2OfEach(const float* x, float* y, long n) {
  ForEach(x, y, n, [](Lanes x) { return Exp2(x); });
}
void TanhOfEach(const float* x, float* y, long n) {
  ForEach(x, y, n, [](Lanes x) { return Tanh(x); });
}
void CapOfEach(const float* x, float* y, long n) {
  ForEach(x, y, n, [](Lanes x) { return SoftCap(x, 100); });
}
void LargeCapOfEach(const float* x, float* y, long n) {
  ForEach(x, y, n, [](Lanes x) { return SoftCap(x, 3e38f); });
}
void FromBFloat16(const BFloat16* x, float* y, long n) { ForEach(x, y, n); }
void FromHalf(const Half* x, float* y, long n) { ForEach(x, y, n); }
void FromE4M3(const Float8E4M3* x, float* y, long n) { ForEach(x, y, n); }
void FromE5M2(const Float8E5M2* x, float* y, long n) { ForEach(x, y, n); }
void FromInt8(const int8_t* x, float* y, long n) { ForEach(x, y, n); }
void E4M3ToBFloat16(const void* x, BFloat16* y, long n) { ToBFloat16s<E4M3>(x, y, n); }
void E5M2ToBFloat16(const void* x, BFloat16* y, long n) { ToBFloat16s<E5M2>(x, y, n); }
void Int8ToBFloat16(const void* x, BFloat16* y, long n) { ToBFloat16s<Int8>(x, y, n); }
void ToE4M3(const float* x, Float8E4M3* y, long n) { Round(x, y, n); }
void ToE5M2(const float* x, Float8E5M2* y, long n) { Round(x, y, n); }
void ToInt8(const float* x, int8_t* y, long n) { Round(x, y, n); }
void ToBFloat16(const float* x, BFloat16* y, long n) { ForEach(x, y, n); }
void ToHalf(const float* x, Half* y, long n) { ForEach(x, y, n); }
"""

NAMES = re.findall(r"^void (\w+)\(", SOURCE, re.MULTILINE)

# Input: a function's number, how many elements it converts, their bytes before and after, and the
# elements.
MAIN = """
#include <vector>
#include "streams.h"

int main() {
  using Function = void(const void* x, void* y, long n);
  void* const functions[] = {FUNCTIONS};
  const auto which = Read<int64_t>(), n = Read<int64_t>();
  std::vector<char> x(n * Read<int64_t>()), y(n * Read<int64_t>());
  ReadBytes(x.data(), x.size());
  reinterpret_cast<Function*>(functions[which])(x.data(), y.data(), n);
  WriteBytes(y.data(), y.size());
}
""".replace("FUNCTIONS", ", ".join(f"(void*){name}" for name in NAMES))

Call = Callable[..., np.ndarray]

INSTRUCTION_SETS = [
    *_native.cpu_instruction_sets(),
    pytest.param("aarch64", marks=pytest.mark.nightly),  # Zig compiles its C++ library for minutes
]


def compile_here(source: Path, instruction_set: str) -> Path:
    program = source.with_suffix("")
    outcome = native.run(
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-ffp-contract=off"),
        *(*flags_of(instruction_set), *(f"-I{path}" for path in INCLUDED), source, "-o", program),
    )
    assert outcome.returncode == 0, outcome.stdout
    return program


def run_here(program: Path, given: bytes) -> bytes:
    return subprocess.run([program], input=given, stdout=subprocess.PIPE, check=True).stdout


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def simd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """simd(name, x, dtype): the result of a function of SOURCE on x."""
    source = tmp_path_factory.mktemp(request.param) / "simd.cc"
    source.write_text(SOURCE + MAIN)
    if request.param == "aarch64":
        program, run = compile_program(source.parent, [source]), run_program
    else:
        program, run = compile_here(source, request.param), run_here

    def call(name: str, x: np.ndarray, dtype: type = np.float32) -> np.ndarray:
        sizes = (NAMES.index(name), x.size, x.itemsize, np.dtype(dtype).itemsize)
        return np.frombuffer(run(program, struct.pack("<4q", *sizes) + x.tobytes()), dtype)

    return call


def test_exp2_within_2_ulp(simd: Call) -> None:
    x = np.linspace(-126, 127, 2_000_003, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32))
    assert np.max(np.abs(simd("Exp2OfEach", x) - exact) / ulp) <= 2
    special = np.array([0, -0.0, -1, -126, -126.5, -1e30, -np.inf, np.nan], np.float32)
    expected = np.array([1, 1, 0.5, 2.0**-126, 0, 0, 0, np.nan], np.float32)
    np.testing.assert_array_equal(simd("Exp2OfEach", special), expected)


def test_tanh_within_2_to_the_minus_23(simd: Call) -> None:
    x = np.concatenate([np.linspace(-20, 20, 1_000_001), [0, np.inf, -np.inf]]).astype(np.float32)
    assert np.max(np.abs(simd("TanhOfEach", x) - np.tanh(x.astype(np.float64)))) <= 2**-23
    assert np.isnan(simd("TanhOfEach", np.array([np.nan], np.float32)))[0]


def test_soft_cap_is_close_relative_to_the_logit(simd: Call) -> None:
    x = np.concatenate([np.linspace(-2000, 2000, 1_000_001), np.logspace(-37, 2, 100_001)])
    x = x[x != 0].astype(np.float32)
    for name, cap in {"CapOfEach": 100.0, "LargeCapOfEach": 3e38}.items():
        exact = cap * np.tanh(x.astype(np.float64) / cap)
        assert np.max(np.abs(simd(name, x) / exact - 1)) <= 2**-20
    special = np.array([0, np.inf, -np.inf, np.nan], np.float32)
    expected = np.array([0, 100, -100, np.nan], np.float32)
    np.testing.assert_array_equal(simd("CapOfEach", special), expected)


@pytest.mark.parametrize(
    ("name", "dtype"), [("BFloat16", ml_dtypes.bfloat16), ("Half", np.float16)]
)
def test_conversions(simd: Call, name: str, dtype: type) -> None:
    """All numbers of a type to float32 and back, and every kind of rounding."""
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


# Input: how many rows K and V have, their bytes, the bytes that a step reads, those of all steps, and
# the addresses of the rows. Output: the lines that were prefetched.
PREFETCHES = """
#include <cstdint>
#include <vector>
#include "streams.h"

static std::vector<int64_t> lines;
#define __builtin_prefetch(address, ...) lines.push_back(reinterpret_cast<int64_t>(address))
#include "paged_attention/cpu/prefetch.h"
using namespace xla_gpu::paged_attention;

int main() {
  const auto n = Read<int64_t>(), row_bytes = Read<int64_t>();
  const auto step = Read<int64_t>(), num_read = Read<int64_t>();
  std::vector<const char*> rows(2 * n);
  ReadBytes(rows.data(), 8 * rows.size());
  std::vector<Prefetcher::Run> runs(2 * n + 1);
  Prefetcher next({&rows[0], n, 0, row_bytes}, {&rows[n], n, 0, row_bytes}, 1, num_read,
                  runs.data());
  for (int64_t i = 0; i < num_read;) {
    Prefetcher::Steps steps(&next, step);
    for (int64_t end = i + 4 * step; i < end && i < num_read; i += step) steps.Take();
  }
  WriteBytes(lines.data(), 8 * lines.size());
}
"""


@pytest.mark.parametrize("step", [72, 700, 9000])
@pytest.mark.parametrize("row_bytes", [2304, 576, 100])
@pytest.mark.parametrize("block_size", [1, 4])
def test_each_line_of_the_next_rows_is_prefetched_once(
    tmp_path: Path, block_size: int, row_bytes: int, step: int
) -> None:
    """The lines of the rows and no others, a block at a time, whatever a step reads."""
    (tmp_path / "prefetch.cc").write_text(PREFETCHES)
    program = compile_here(tmp_path / "prefetch.cc", "baseline")
    blocks = np.random.default_rng(0).permutation(16) * 1_000_000 + 320
    rows = (blocks[:, None] + np.arange(block_size) * row_bytes).reshape(2, -1)
    num_read = -(-20_000 // step) * step
    given = struct.pack("<4q", rows.shape[1], row_bytes, step, num_read)
    lines = np.frombuffer(run_here(program, given + rows.astype("<i8").tobytes()), "<i8") // 64
    in_turn = blocks.reshape(2, -1).T.ravel()
    expected = [
        np.arange(block // 64, -(-(block + block_size * row_bytes) // 64)) for block in in_turn
    ]
    np.testing.assert_array_equal(lines, np.concatenate(expected))


NARROW = {
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
    "Int8": "int8",
}


@pytest.mark.parametrize("name", NARROW)
def test_all_numbers_of_8_bits(simd: Call, name: str) -> None:
    every = np.arange(256, dtype=np.uint8).view(CACHE_DTYPES[NARROW[name]])
    np.testing.assert_array_equal(simd(f"From{name}", every), every.astype(np.float32))
    as_bfloat16 = simd(f"{name}ToBFloat16", every, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(as_bfloat16.astype(np.float32), every.astype(np.float32))


@pytest.mark.parametrize("name", NARROW)
def test_rounding_to_8_bits(simd: Call, name: str) -> None:
    """Every number, the midpoints between neighbours, the floats beside the midpoints, and random
    bits."""
    dtype = NARROW[name]
    every = np.arange(256, dtype=np.uint8).view(CACHE_DTYPES[dtype]).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    halfway = (every[1:] + every[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(to)) for to in (-np.inf, np.inf)]
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_001, dtype=np.uint32)
    x = np.concatenate([every, halfway, *beside, bits.view(np.float32)])
    with np.errstate(invalid="ignore"):  # NaN
        expected = quantized(x, dtype).astype(np.float32)
    rounded = simd(f"To{name}", x, CACHE_DTYPES[dtype]).astype(np.float32)
    np.testing.assert_array_equal(rounded, expected)
