// The operations that differ between instruction sets, in plain vector code. The other files take
// from here what their instruction set has no instruction for.
#pragma once

#include "types.h"

namespace xla_gpu {
namespace {
namespace portable {

// a * b + c, rounded twice.
XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes c) { return a * b + c; }

XLA_GPU_INLINE Words Widen(HalfWords x) { return __builtin_convertvector(x, Words); }

// Signed bytes to 16 bits.
XLA_GPU_INLINE HalfWords WidenBytes(Bytes x) {
  return (HalfWords) __builtin_convertvector((SignedBytes)x, SignedHalfWords);
}

// Signed bytes to float.
XLA_GPU_INLINE Lanes WidenInt8(Bytes x) {
  return __builtin_convertvector(__builtin_convertvector((SignedBytes)x, Mask), Lanes);
}

// binary16 to float. A multiplication rebases the exponent, exactly also for subnormals.
XLA_GPU_INLINE Lanes WidenHalf(HalfWords x) {
  const Words bits = Widen(x), magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const Words finite = BitCast<Words>(BitCast<Lanes>(magnitude) * 0x1p112f);
  return BitCast<Lanes>(sign | (magnitude < 0x0f800000u ? finite : magnitude | 0x7f800000u));
}

// float to binary16, to nearest, ties to even.
XLA_GPU_INLINE HalfWords NarrowToHalf(Lanes x) {
  HalfWords narrow;
  for (int i = 0; i < kLanes; ++i) {
    Half half;
    FromFloat(x[i], &half);
    narrow[i] = half.bits;
  }
  return narrow;
}

// The bytes of a table that these bytes, from 0 to 15, are the indices of.
XLA_GPU_INLINE Bytes16 LookUp(Bytes16 table, Bytes16 indices) {
  uint8_t from[16], numbers[16];
  memcpy(from, &table, 16);
  memcpy(numbers, &indices, 16);
  for (uint8_t& number : numbers) number = from[number];
  memcpy(&indices, numbers, 16);
  return indices;
}

// All of 16 signed bytes to float.
XLA_GPU_INLINE void WidenInt8(Bytes16 x, Lanes (&to)[16 / kLanes]) {
  Bytes parts[16 / kLanes];
  memcpy(parts, &x, 16);
  for (int i = 0; i < 16 / kLanes; ++i) to[i] = WidenInt8(parts[i]);
}

// x - 0.5, rounded to an integer n and kept as 1.5 * 2^23 + n, whose low bits are n's.
XLA_GPU_INLINE Lanes ShiftedFloor(Lanes x) { return x - 0.5f + 12582912.0f; }

// x - n for that n: from 0 to 1.
XLA_GPU_INLINE Lanes Fraction(Lanes x) { return x - (ShiftedFloor(x) - 12582912.0f); }

// y * 2^n for x's n; 0 where x < -126.
XLA_GPU_INLINE Lanes ScaleByFloor(Lanes y, Lanes x) {
  const Words exponent = (BitCast<Words>(ShiftedFloor(x)) + 127) << 23;
  return x < -126.0f ? Lanes{} : y * BitCast<Lanes>(exponent);
}

}  // namespace portable
}  // namespace
}  // namespace xla_gpu
