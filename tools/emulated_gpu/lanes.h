// What the instructions of single lanes share: they apply a function to the lanes' values.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "machine.h"
#include "tables.h"

namespace emulated_gpu {

using S16 = int16_t;
using S32 = int32_t;
using S64 = int64_t;
using U16 = uint16_t;
using U32 = uint32_t;
using U64 = uint64_t;
using F32 = float;
using F64 = double;

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
// Subnormal numbers become zeros.
inline F32 Flush(F32 x) {
  return std::fabs(x) < std::numeric_limits<F32>::min() ? std::copysign(0.0f, x) : x;
}

template <typename D, typename A, typename F>
Outcome Map1(Warp& w, const Instruction& i) {
  D* d = w.Lanes<D>(i, 0);
  const A* a = w.Lanes<A>(i, 1);
  ForActive(w.active, [=](int l) { d[l] = static_cast<D>(F::Of(a[l])); });
  return Outcome::kDone;
}

template <typename D, typename A, typename F, typename B = A>
Outcome Map2(Warp& w, const Instruction& i) {
  D* d = w.Lanes<D>(i, 0);
  const A* a = w.Lanes<A>(i, 1);
  const B* b = w.Lanes<B>(i, 2);
  ForActive(w.active, [=](int l) { d[l] = static_cast<D>(F::Of(a[l], b[l])); });
  return Outcome::kDone;
}

template <typename D, typename A, typename F, typename C = A>
Outcome Map3(Warp& w, const Instruction& i) {
  D* d = w.Lanes<D>(i, 0);
  const A *a = w.Lanes<A>(i, 1), *b = w.Lanes<A>(i, 2);
  const C* c = w.Lanes<C>(i, 3);
  ForActive(w.active, [=](int l) { d[l] = static_cast<D>(F::Of(a[l], b[l], c[l])); });
  return Outcome::kDone;
}

// Integers wrap, so they are added without sign.
template <typename T>
auto Unsigned(T x) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<U64>(x);
  else
    return x;
}

struct Add {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(Unsigned(a) + Unsigned(b));
  }
};
struct Sub {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(Unsigned(a) - Unsigned(b));
  }
};
struct Mul {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(Unsigned(a) * Unsigned(b));
  }
};
struct MulHigh {
  template <typename T>
  static T Of(T a, T b) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<Wide>(a) * b) >> (8 * sizeof(T)));
  }
};
struct MulWide {
  static S64 Of(S32 a, S32 b) { return S64{a} * b; }
  static U64 Of(U32 a, U32 b) { return U64{a} * b; }
  static S32 Of(S16 a, S16 b) { return S32{a} * b; }
  static U32 Of(U16 a, U16 b) { return U32{a} * b; }
};
struct MulAdd {
  template <typename T>
  static T Of(T a, T b, T c) {
    return Add::Of(Mul::Of(a, b), c);
  }
};
struct MulAddWide {
  template <typename T, typename C>
  static C Of(T a, T b, C c) {
    return Add::Of(static_cast<C>(MulWide::Of(a, b)), c);
  }
};
struct Div {
  template <typename T>
  static T Of(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) return static_cast<T>(-1);
      if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub::Of(T{0}, a);
    }
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <typename T>
  static T Of(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
struct Min {
  template <typename T>
  static T Of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a) return b;
      if (a == b) return std::signbit(a) ? a : b;
      return b != b || a < b ? a : b;
    } else {
      return b < a ? b : a;
    }
  }
};
struct Max {
  template <typename T>
  static T Of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      if (a != a) return b;
      if (a == b) return std::signbit(a) ? b : a;
      return b != b || a > b ? a : b;
    } else {
      return a < b ? b : a;
    }
  }
};
struct And {
  template <typename T>
  static T Of(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <typename T>
  static T Of(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  static T Of(T a, T b) {
    return a ^ b;
  }
};
struct Not {
  template <typename T>
  static T Of(T a) {
    return ~a;
  }
};
struct Neg {
  template <typename T>
  static T Of(T a) {
    if constexpr (std::is_integral_v<T>)
      return Sub::Of(T{0}, a);
    else
      return -a;
  }
};
struct Abs {
  template <typename T>
  static T Of(T a) {
    if constexpr (std::is_integral_v<T>)
      return a < 0 ? Sub::Of(T{0}, a) : a;
    else
      return std::fabs(a);
  }
};
struct Copy {
  template <typename T>
  static T Of(T a) {
    return a;
  }
};
// The two halves of a word.
template <typename F>
struct Halves {
  static U32 Of(U32 a, U32 b) {
    const U32 low = F::Of(static_cast<U16>(a), static_cast<U16>(b));
    return low | static_cast<U32>(F::Of(static_cast<U16>(a >> 16), static_cast<U16>(b >> 16)))
                     << 16;
  }
  static U32 Of(U32 a, U32 b, U32 c) {
    const U32 low = F::Of(static_cast<U16>(a), static_cast<U16>(b), static_cast<U16>(c));
    return low | static_cast<U32>(F::Of(static_cast<U16>(a >> 16), static_cast<U16>(b >> 16),
                                        static_cast<U16>(c >> 16)))
                     << 16;
  }
};
struct Equal {
  template <typename T>
  static bool Of(T a, T b) {
    return a == b;
  }
};
struct NotEqual {
  template <typename T>
  static bool Of(T a, T b) {
    return a < b || a > b;
  }
};
struct Less {
  template <typename T>
  static bool Of(T a, T b) {
    return a < b;
  }
};
struct LessEqual {
  template <typename T>
  static bool Of(T a, T b) {
    return a <= b;
  }
};
struct Greater {
  template <typename T>
  static bool Of(T a, T b) {
    return a > b;
  }
};
struct GreaterEqual {
  template <typename T>
  static bool Of(T a, T b) {
    return a >= b;
  }
};
// setp d[|q], a, b[, c]: number: 0 alone, 1 and, 2 or, 3 xor, of c.
template <typename T, typename F>
Outcome Compare(Warp& w, const Instruction& i) {
  const int combination = i.number;
  const bool has_second = i.NumOperands() == (combination == 0 ? 4 : 5);
  const int first = has_second ? 2 : 1;
  const T *a = w.Lanes<T>(i, first), *b = w.Lanes<T>(i, first + 1);
  uint32_t is = 0;
  for (int l = 0; l < kLanes; ++l) is |= static_cast<uint32_t>(F::Of(a[l], b[l])) << l;
  uint32_t is_not = ~is;
  if (combination != 0) {
    const uint32_t c = w.PredicateValue(i.At(first + 2));
    const auto combined = [&](uint32_t x) {
      return combination == 1 ? x & c : combination == 2 ? x | c : x ^ c;
    };
    is = combined(is);
    is_not = combined(is_not);
  }
  const auto set = [&](const Operand& operand, uint32_t value) {
    if (operand.slot < 0) return;
    uint32_t& d = w.Predicate(operand);
    d = (d & ~w.active) | (value & w.active);
  };
  set(i.At(0), is);
  if (has_second) set(i.At(1), is_not);
  return Outcome::kDone;
}

template <typename T>
Outcome Select(Warp& w, const Instruction& i) {
  T* d = w.Lanes<T>(i, 0);
  const T *a = w.Lanes<T>(i, 1), *b = w.Lanes<T>(i, 2);
  const uint32_t p = w.PredicateValue(i.At(3));
  ForActive(w.active, [=](int l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
  return Outcome::kDone;
}

// mov of a word into its parts or back. Parts of the same size.
template <typename Word, typename Part>
void MoveParts(Warp& w, const Instruction& i, bool unpacks) {
  constexpr size_t kParts = sizeof(Word) / sizeof(Part);
  const size_t first = static_cast<size_t>(i.first[1]);
  ForActive(w.active, [&](int l) {
    if (unpacks) {
      const Word word = w.Lanes<Word>(i, 1)[l];
      for (size_t k = 0; k < kParts; ++k) {
        if (i.operands[k].slot >= 0)
          w.Lanes<Part>(i.operands[k])[l] = static_cast<Part>(word >> (8 * sizeof(Part) * k));
      }
    } else {
      U64 word = 0;
      for (size_t k = 0; k < kParts; ++k) {
        word |= static_cast<U64>(w.Lanes<Part>(i.operands[first + k])[l]) << (8 * sizeof(Part) * k);
      }
      w.Lanes<Word>(i, 0)[l] = static_cast<Word>(word);
    }
  });
}

template <typename T>
Outcome Move(Warp& w, const Instruction& i) {
  if (i.operands.size() == 2) return Map1<T, T, Copy>(w, i);
  const bool unpacks = i.first[1] > 1;
  const size_t parts = i.operands.size() - 1;
  if constexpr (sizeof(T) == 8) {
    if (parts == 2)
      MoveParts<U64, U32>(w, i, unpacks);
    else
      MoveParts<U64, U16>(w, i, unpacks);
  } else if constexpr (sizeof(T) == 4) {
    if (parts == 2)
      MoveParts<U32, U16>(w, i, unpacks);
    else
      MoveParts<U32, uint8_t>(w, i, unpacks);
  }
  return Outcome::kDone;
}

}  // namespace emulated_gpu
