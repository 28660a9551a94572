// NEON of AArch64.
#pragma once

#include <arm_neon.h>

#include "portable.h"

namespace xla_gpu {
namespace {

using portable::Fraction;
using portable::ScaleByFloor;
using portable::Widen;
using portable::WidenBytes;
using portable::WidenInt8;

// a * b + c, rounded once.
XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes c) {
  return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

XLA_GPU_INLINE Bytes16 LookUp(Bytes16 table, Bytes16 indices) {
  return (Bytes16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
}

XLA_GPU_INLINE Lanes WidenHalf(HalfWords x) { return (Lanes)vcvt_f32_f16((float16x4_t)x); }

XLA_GPU_INLINE HalfWords NarrowToHalf(Lanes x) { return (HalfWords)vcvt_f16_f32((float32x4_t)x); }

}  // namespace
}  // namespace xla_gpu
