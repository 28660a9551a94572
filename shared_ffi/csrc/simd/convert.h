// Vectors of float from and to the storage types. `count` numbers exist in memory, and no others
// are touched: a load gives zeros in their place.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace xla_gpu {
namespace {

// A vector of T as it is stored.
template <typename T>
using Stored =
    std::conditional_t<sizeof(T) == 4, Words, std::conditional_t<sizeof(T) == 2, HalfWords, Bytes>>;

// Loads a vector that holds equal parts of kRows rows, of each of which num_bytes exist.
template <typename V, int kRows>
XLA_GPU_INLINE V LoadRows(const void* const (&rows)[kRows], int64_t num_bytes) {
  if constexpr (kRows == 1) {
    constexpr int64_t kBytes = sizeof(V);
    return num_bytes >= kBytes ? Load<V>(rows[0]) : LoadPart<V>(rows[0], num_bytes);
  } else {
    using Half =
        std::conditional_t<sizeof(V) == sizeof(Words), HalfWords,
                           std::conditional_t<sizeof(V) == sizeof(HalfWords), Bytes, int64_t>>;
    return Join(LoadRows<Half, 1>({rows[0]}, num_bytes), LoadRows<Half, 1>({rows[1]}, num_bytes));
  }
}

// Loads kChains floats as the part of each row.
template <int kRows = kRowsPerVector>
XLA_GPU_INLINE Lanes LoadRepeated(const float* from) {
  if constexpr (kRows == 1) {
    return Load<Lanes>(from);
  } else {
    using Half = std::conditional_t<kRows == 2, HalfWords, void>;
    return BitCast<Lanes>(Repeat(Load<Half>(from)));
  }
}

XLA_GPU_INLINE Lanes ToFloats(Words x, float) { return BitCast<Lanes>(x); }

XLA_GPU_INLINE Lanes ToFloats(HalfWords x, BFloat16) { return BitCast<Lanes>(Widen(x) << 16); }

XLA_GPU_INLINE Lanes ToFloats(HalfWords x, Half) { return WidenHalf(x); }

XLA_GPU_INLINE Lanes ToFloats(Bytes x, Float8E5M2) { return WidenHalf(WidenBytes(x) << 8); }

// Goes by way of binary16, in which E4M3's subnormals are normal numbers. NaN becomes the default
// quiet NaN: torch_xla puts it in the place of every NaN of a binary16 array.
XLA_GPU_INLINE Lanes ToFloats(Bytes bytes, Float8E4M3) {
  const HalfWords x = WidenBytes(bytes);
  const HalfWords magnitude = x & 0x7f, nan = magnitude - magnitude + 0x7e00;
  const HalfWords half = magnitude == 0x7f ? nan : magnitude << 7;
  return WidenHalf(half | (x & 0x80) << 8) * 256.0f;
}

XLA_GPU_INLINE Lanes ToFloats(Bytes x, int8_t) { return WidenInt8(x); }

XLA_GPU_INLINE Lanes ToFloats(Bytes bytes, Float8E8M0) {
  const Words x = Widen(WidenBytes(bytes) & 0xff), zero = x ^ x;
  const Words finite = x == 0 ? zero + 0x00400000 : x << 23;  // 2^-127 is subnormal
  return BitCast<Lanes>(x == 255 ? zero + 0x7fc00000 : finite);
}

// The numbers of a row of T.
template <typename T, typename = void>
struct NumbersOf {
  XLA_GPU_INLINE static float At(const void* row, int64_t i) {
    return ToFloat(static_cast<const T*>(row)[i]);
  }
  // Loads 16 from the i-th on.
  XLA_GPU_INLINE static void LoadBlock(const void* row, int64_t i, Lanes (&to)[16 / kLanes]) {
#pragma GCC unroll 4
    for (Lanes& lanes : to) {
      lanes = ToFloats(Load<Stored<T>>(static_cast<const T*>(row) + i), T());
      i += kLanes;
    }
  }
};

// Codes::kNumbers, in a table of this file: objects for instruction sets share no symbol.
struct TableOf16 {
  int8_t numbers[16];
};
template <typename Codes>
constexpr TableOf16 TableOfCodes() {
  TableOf16 table = {};
  for (int i = 0; i < 16; ++i) table.numbers[i] = Codes::kNumbers[i];
  return table;
}
template <typename Codes>
constexpr TableOf16 kTable = TableOfCodes<Codes>();

// The same of pairs of codes, in their units. A block begins at an even number.
template <typename Codes>
struct NumbersOf<Codes, std::void_t<decltype(Codes::kNumbers)>> {
  XLA_GPU_INLINE static float At(const void* row, int64_t i) {
    return kTable<Codes>.numbers[static_cast<const uint8_t*>(row)[i / 2] >> (i % 2 * 4) & 15];
  }
  XLA_GPU_INLINE static void LoadBlock(const void* row, int64_t i, Lanes (&to)[16 / kLanes]) {
    const auto pairs = LoadPart<Bytes16>(static_cast<const char*>(row) + i / 2, 8);
    const Bytes16 codes = Interleave(pairs & 15, pairs >> 4);
    WidenInt8(LookUp(Load<Bytes16>(kTable<Codes>.numbers), codes), to);
  }
};

// LoadRows, converted to float; `count` numbers of each row exist.
template <typename T, int kRows>
XLA_GPU_INLINE Lanes LoadWideRows(const void* const (&rows)[kRows], int64_t count) {
  constexpr int64_t kBytes = sizeof(T);
  if constexpr (kRows == 2 && std::is_same_v<T, Half>) {
    return WidenHalves(LoadRows<Bytes, 1>({rows[0]}, count * kBytes),
                       LoadRows<Bytes, 1>({rows[1]}, count * kBytes));
  } else {
    return ToFloats(LoadRows<Stored<T>>(rows, count * kBytes), T());
  }
}

template <typename T>
XLA_GPU_INLINE Lanes LoadWide(const T* from, int64_t count) {
  return LoadWideRows<T, 1>({from}, count);
}

XLA_GPU_INLINE Lanes Narrow(Lanes x, float) { return x; }

XLA_GPU_INLINE HalfWords Narrow(Lanes x, BFloat16) {
  const Words bits = BitCast<Words>(x);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet_nan = bits >> 16 | 0x0040;
  return __builtin_convertvector(x != x ? quiet_nan : rounded, HalfWords);
}

XLA_GPU_INLINE HalfWords Narrow(Lanes x, Half) { return NarrowToHalf(x); }

// Rounds to nearest, ties to even. Overflow gives infinity; a NaN stays a (quiet) NaN.
template <typename T>
XLA_GPU_INLINE void StoreNarrow(Lanes x, T* to, int64_t count) {
  const auto narrow = Narrow(x, T());
  if (count >= kLanes) {
    Store(narrow, to);
  } else {
    std::memcpy(to, &narrow, count * sizeof(T));
  }
}

}  // namespace
}  // namespace xla_gpu
