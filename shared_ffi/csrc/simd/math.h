// exp2, tanh and the soft cap.
#pragma once

#include "lanes.h"

namespace xla_gpu {
namespace {

// 2^x for x < 128 or NaN, within 2 ulp; 0 where 2^x would be subnormal. x = n + f with an integer n
// and 0 <= f <= 1. The polynomial for 2^f has degree 6, is exact at 0, and has the least maximal
// relative error: 2^-28.9.
XLA_GPU_INLINE Lanes Exp2(Lanes x) {
  const Lanes f = Fraction(x);
  Lanes y = Splat(2.1612928e-4f);
  y = MultiplyAdd(y, f, Splat(1.2467842e-3f));
  y = MultiplyAdd(y, f, Splat(9.675452e-3f));
  y = MultiplyAdd(y, f, Splat(5.5485282e-2f));
  y = MultiplyAdd(y, f, Splat(2.4022931e-1f));
  y = MultiplyAdd(y, f, Splat(6.9314706e-1f));
  y = MultiplyAdd(y, f, Splat(1.0f));
  return ScaleByFloor(y, x);
}

// tanh(x), within 2^-23 of it.
XLA_GPU_INLINE Lanes Tanh(Lanes x) {
  const Lanes magnitude = x < 0 ? -x : x;
  const Lanes e = Exp2(magnitude * -2.88539008f);  // e^(-2 |x|)
  const Lanes tanh = (1.0f - e) / (1.0f + e);
  return x < 0 ? -tanh : tanh;
}

// cap * tanh(x / cap), within 2^-20 of it relatively: where x is far less than the cap, it is x.
// For |x / cap| below 1/2, the polynomial for tanh(y) / y in y^2 has the least maximal relative
// error: 2^-26.
XLA_GPU_INLINE Lanes SoftCap(Lanes x, float cap) {
  const Lanes y = x * (1 / cap), square = y * y;
  Lanes ratio = Splat(1.7241893e-2f);
  ratio = MultiplyAdd(ratio, square, Splat(-5.3045664e-2f));
  ratio = MultiplyAdd(ratio, square, Splat(1.3325880e-1f));
  ratio = MultiplyAdd(ratio, square, Splat(-3.3333144e-1f));
  ratio = MultiplyAdd(ratio, square, Splat(1.0f));
  return square < 0.25f ? x * ratio : Tanh(y) * cap;
}

}  // namespace
}  // namespace xla_gpu
