// Vectors of float from and to the storage types. `count` numbers exist in memory, and no others
// are touched: a load gives zeros in their place.
#pragma once

#include "instruction_set.h"
#include "lanes.h"

namespace xla_gpu {
namespace {

XLA_GPU_INLINE HalfWords LoadHalfWords(const void* from, int64_t count) {
  return count >= kLanes ? Load<HalfWords>(from) : LoadPart<HalfWords>(from, 2 * count);
}

XLA_GPU_INLINE Bytes LoadBytes(const void* from, int64_t count) {
  return count >= kLanes ? Load<Bytes>(from) : LoadPart<Bytes>(from, count);
}

XLA_GPU_INLINE Lanes LoadWide(const float* from, int64_t count) {
  return count >= kLanes ? Load<Lanes>(from) : LoadPart<Lanes>(from, 4 * count);
}

XLA_GPU_INLINE Lanes LoadWide(const BFloat16* from, int64_t count) {
  return BitCast<Lanes>(Widen(LoadHalfWords(from, count)) << 16);
}

XLA_GPU_INLINE Lanes LoadWide(const Half* from, int64_t count) {
  return WidenHalf(LoadHalfWords(from, count));
}

XLA_GPU_INLINE Lanes LoadWide(const Float8E5M2* from, int64_t count) {
  return WidenHalf(WidenBytes(LoadBytes(from, count)) << 8);
}

// Goes by way of binary16, in which E4M3's subnormals are normal numbers. NaN becomes the default
// quiet NaN: torch_xla puts it in the place of every NaN of a binary16 array.
XLA_GPU_INLINE Lanes LoadWide(const Float8E4M3* from, int64_t count) {
  const HalfWords x = WidenBytes(LoadBytes(from, count));
  const HalfWords magnitude = x & 0x7f, nan = magnitude - magnitude + 0x7e00;
  const HalfWords half = magnitude == 0x7f ? nan : magnitude << 7;
  return WidenHalf(half | (x & 0x80) << 8) * 256.0f;
}

XLA_GPU_INLINE Lanes LoadWide(const int8_t* from, int64_t count) {
  return WidenInt8(LoadBytes(from, count));
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
