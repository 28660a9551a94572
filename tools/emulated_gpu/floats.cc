// Instructions of single lanes on floating point numbers.
#include "lanes.h"

namespace emulated_gpu {
namespace {

struct CopySign {
  static F32 Of(F32 a, F32 b) { return std::copysign(b, a); }
};
struct Fused {
  template <typename T>
  static T Of(T a, T b, T c) {
    return std::fma(a, b, c);
  }
};
template <typename F>
struct Flushed {
  static F32 Of(F32 a, F32 b) { return Flush(F::Of(Flush(a), Flush(b))); }
};
// By way of double: rounded correctly, but for one of 10^8.
inline F32 PowerOfTwo(F32 a) { return static_cast<F32>(std::exp2(F64{a})); }
struct Exp2Flush {
  static F32 Of(F32 a) { return Flush(PowerOfTwo(Flush(a))); }
};
struct Log2Flush {
  static F32 Of(F32 a) { return Flush(std::log2(Flush(a))); }
};
struct Exp2 {
  static F32 Of(F32 a) { return PowerOfTwo(a); }
};
struct Log2 {
  static F32 Of(F32 a) { return std::log2(a); }
};
struct Reciprocal {
  template <typename T>
  static T Of(T a) {
    return 1 / a;
  }
};
struct ReciprocalFlush {
  static F32 Of(F32 a) { return Flush(1 / Flush(a)); }
};
struct SquareRoot {
  static F32 Of(F32 a) { return std::sqrt(a); }
};
struct ReciprocalRoot {
  static F32 Of(F32 a) { return 1 / std::sqrt(a); }
};
struct DivFull {
  static F32 Of(F32 a, F32 b) { return a / b; }
};
// float16 and bfloat16, by way of float: sums and products of two are rounded once more, which is
// exact because a float has more than twice their digits.
template <typename T>
struct Narrow;
template <>
struct Narrow<_Float16> {
  static F32 Widen(U16 x) { return static_cast<F32>(BitCast<_Float16>(x)); }
  static U16 Round(F32 x) { return x != x ? U16{0x7fff} : BitCast<U16>(static_cast<_Float16>(x)); }
};
struct BFloat16;
template <>
struct Narrow<BFloat16> {
  static F32 Widen(U16 x) { return BitCast<F32>(static_cast<U32>(x) << 16); }
  static U16 Round(F32 x) {
    if (x != x) return 0x7fff;
    const U32 bits = BitCast<U32>(x);
    return static_cast<U16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};
template <typename T, typename F>
struct Rounded {
  static U16 Of(U16 a, U16 b) {
    return Narrow<T>::Round(F::Of(Narrow<T>::Widen(a), Narrow<T>::Widen(b)));
  }
  static U16 Of(U16 a, U16 b, U16 c) {  // a double holds every sum of a product and c well enough
    const F64 sum = F64{Narrow<T>::Widen(a)} * Narrow<T>::Widen(b) + Narrow<T>::Widen(c);
    return Narrow<T>::Round(static_cast<F32>(sum));
  }
};
template <typename T>
struct RoundTwo {
  static U32 Of(F32 high, F32 low) {
    return static_cast<U32>(Narrow<T>::Round(high)) << 16 | Narrow<T>::Round(low);
  }
};
template <typename T>
struct RoundOne {
  static U16 Of(F32 a) { return Narrow<T>::Round(a); }
};
template <typename T>
struct WidenOne {
  static F32 Of(U16 a) { return Narrow<T>::Widen(a); }
};
// Two numbers of float8 to float16.
struct WidenE4M3 {
  static U32 One(U32 x) {
    const U32 sign = (x & 0x80) << 8;
    if ((x & 0x7f) == 0x7f) return sign | 0x7fff;
    const F32 value = Narrow<_Float16>::Widen(static_cast<U16>((x & 0x7f) << 7)) * 256.0f;
    return sign | Narrow<_Float16>::Round(value);
  }
  static U32 Of(U16 a) { return One(a & 0xff) | One(a >> 8) << 16; }
};
struct WidenE5M2 {
  static U32 Of(U16 a) { return (a & 0xffu) << 8 | (a & 0xff00u) << 16; }
};

template <typename F>
struct OrUnordered {
  template <typename T>
  static bool Of(T a, T b) {
    return a != a || b != b || F::Of(a, b);
  }
};
struct BothNumbers {
  template <typename T>
  static bool Of(T a, T b) {
    return a == a && b == b;
  }
};
struct SomeNan {
  template <typename T>
  static bool Of(T a, T b) {
    return a != a || b != b;
  }
};

template <typename A>
struct ToFloat {
  static F32 Of(A a) { return static_cast<F32>(a); }
};
// To the nearest, upwards, downwards or towards zero; out of range to the nearest in range.
template <typename D, int kMode>
struct ToInteger {
  static D Of(F32 a) {
    if (a != a) return 0;
    const F64 x = kMode == 0   ? std::nearbyint(F64{a})
                  : kMode == 1 ? std::trunc(F64{a})
                  : kMode == 2 ? std::floor(F64{a})
                               : std::ceil(F64{a});
    if (x <= static_cast<F64>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
    if (x >= static_cast<F64>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    return static_cast<D>(x);
  }
};
template <int kMode>
struct RoundInteger {
  static F32 Of(F32 a) {
    return kMode == 0   ? std::nearbyint(a)
           : kMode == 1 ? std::trunc(a)
           : kMode == 2 ? std::floor(a)
                        : std::ceil(a);
  }
};

template <typename T, typename F>
void AddFloatComparison(Table* t, const std::string& name, const std::string& type) {
  (*t)["setp." + name + "." + type] = Compare<T, F>;
  (*t)["setp." + name + "u." + type] = Compare<T, OrUnordered<F>>;
}

template <typename D>
void AddConversions(Table* t, const std::string& to) {
  if constexpr (sizeof(D) >= 4) {
    (*t)["cvt.rni." + to + ".f32"] = Map1<D, F32, ToInteger<D, 0>>;
    (*t)["cvt.rzi." + to + ".f32"] = Map1<D, F32, ToInteger<D, 1>>;
    (*t)["cvt.rmi." + to + ".f32"] = Map1<D, F32, ToInteger<D, 2>>;
    (*t)["cvt.rpi." + to + ".f32"] = Map1<D, F32, ToInteger<D, 3>>;
  }
  if constexpr (sizeof(D) >= 2) (*t)["cvt.rn.f32." + to] = Map1<F32, D, ToFloat<D>>;
}

template <typename T>
void AddNarrow(Table* t, const std::string& type) {
  using U = U16;
  (*t)["cvt.rn." + type + ".f32"] = Map1<U, F32, RoundOne<T>>;
  (*t)["cvt.rn." + type + "x2.f32"] = Map2<U32, F32, RoundTwo<T>>;
  (*t)["cvt.f32." + type] = Map1<F32, U, WidenOne<T>>;
  for (const std::string& rounding : {std::string(), std::string(".rn")}) {
    (*t)["add" + rounding + "." + type] = Map2<U, U, Rounded<T, Add>>;
    (*t)["sub" + rounding + "." + type] = Map2<U, U, Rounded<T, Sub>>;
    (*t)["mul" + rounding + "." + type] = Map2<U, U, Rounded<T, Mul>>;
    (*t)["add" + rounding + "." + type + "x2"] = Map2<U32, U32, Halves<Rounded<T, Add>>>;
    (*t)["sub" + rounding + "." + type + "x2"] = Map2<U32, U32, Halves<Rounded<T, Sub>>>;
    (*t)["mul" + rounding + "." + type + "x2"] = Map2<U32, U32, Halves<Rounded<T, Mul>>>;
  }
  (*t)["fma.rn." + type] = Map3<U, U, Rounded<T, void>>;
  (*t)["fma.rn." + type + "x2"] = Map3<U32, U32, Halves<Rounded<T, void>>>;
  (*t)["max." + type + "x2"] = Map2<U32, U32, Halves<Rounded<T, Max>>>;
  (*t)["min." + type + "x2"] = Map2<U32, U32, Halves<Rounded<T, Min>>>;
}

}  // namespace

void AddFloats(Table* t) {
  AddNarrow<_Float16>(t, "f16");
  AddNarrow<BFloat16>(t, "bf16");
  (*t)["cvt.rn.f16x2.e4m3x2"] = Map1<U32, U16, WidenE4M3>;
  (*t)["cvt.rn.f16x2.e5m2x2"] = Map1<U32, U16, WidenE5M2>;
  AddConversions<S16>(t, "s16");
  AddConversions<U16>(t, "u16");
  AddConversions<S32>(t, "s32");
  AddConversions<U32>(t, "u32");
  AddConversions<S64>(t, "s64");
  AddConversions<U64>(t, "u64");
  for (const std::string& rounding : {std::string(), std::string(".rn")}) {
    (*t)["add" + rounding + ".f32"] = Map2<F32, F32, Add>;
    (*t)["sub" + rounding + ".f32"] = Map2<F32, F32, Sub>;
    (*t)["mul" + rounding + ".f32"] = Map2<F32, F32, Mul>;
  }
  (*t)["add.ftz.f32"] = Map2<F32, F32, Flushed<Add>>;
  (*t)["mul.ftz.f32"] = Map2<F32, F32, Flushed<Mul>>;
  (*t)["fma.rn.f32"] = Map3<F32, F32, Fused>;
  (*t)["div.rn.f32"] = Map2<F32, F32, Div>;
  (*t)["div.full.f32"] = Map2<F32, F32, DivFull>;
  (*t)["rcp.rn.f32"] = Map1<F32, F32, Reciprocal>;
  (*t)["rcp.approx.ftz.f32"] = Map1<F32, F32, ReciprocalFlush>;
  (*t)["sqrt.rn.f32"] = (*t)["sqrt.approx.f32"] = Map1<F32, F32, SquareRoot>;
  (*t)["rsqrt.approx.f32"] = Map1<F32, F32, ReciprocalRoot>;
  (*t)["ex2.approx.ftz.f32"] = Map1<F32, F32, Exp2Flush>;
  (*t)["ex2.approx.f32"] = Map1<F32, F32, Exp2>;
  (*t)["lg2.approx.ftz.f32"] = Map1<F32, F32, Log2Flush>;
  (*t)["lg2.approx.f32"] = Map1<F32, F32, Log2>;
  (*t)["min.f32"] = Map2<F32, F32, Min>;
  (*t)["max.f32"] = Map2<F32, F32, Max>;
  (*t)["neg.f32"] = Map1<F32, F32, Neg>;
  (*t)["abs.f32"] = Map1<F32, F32, Abs>;
  (*t)["copysign.f32"] = Map2<F32, F32, CopySign>;
  (*t)["mov.f32"] = Move<U32>;
  (*t)["mov.f64"] = Move<U64>;
  (*t)["selp.f32"] = Select<U32>;
  (*t)["selp.f64"] = Select<U64>;
  (*t)["cvt.rni.f32.f32"] = Map1<F32, F32, RoundInteger<0>>;
  (*t)["cvt.rzi.f32.f32"] = Map1<F32, F32, RoundInteger<1>>;
  (*t)["cvt.rmi.f32.f32"] = Map1<F32, F32, RoundInteger<2>>;
  (*t)["cvt.rpi.f32.f32"] = Map1<F32, F32, RoundInteger<3>>;
  AddFloatComparison<F32, Equal>(t, "eq", "f32");
  AddFloatComparison<F32, NotEqual>(t, "ne", "f32");
  AddFloatComparison<F32, Less>(t, "lt", "f32");
  AddFloatComparison<F32, LessEqual>(t, "le", "f32");
  AddFloatComparison<F32, Greater>(t, "gt", "f32");
  AddFloatComparison<F32, GreaterEqual>(t, "ge", "f32");
  (*t)["setp.num.f32"] = Compare<F32, BothNumbers>;
  (*t)["setp.nan.f32"] = Compare<F32, SomeNan>;
}

}  // namespace emulated_gpu
