// Instructions of single lanes on integers, predicates and addresses, and branches.
#include "lanes.h"

namespace emulated_gpu {
namespace {

// Shifts by the number of bits or more give what is left then.
struct ShiftLeft {
  template <typename T>
  static T Of(T a, U32 b) {
    return b >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<U64>(a) << b);
  }
};
struct ShiftRight {
  template <typename T>
  static T Of(T a, U32 b) {
    const U32 most = 8 * sizeof(T) - 1;
    if (b > most) return std::is_signed_v<T> ? static_cast<T>(a >> most) : T{0};
    return static_cast<T>(a >> b);
  }
};
struct PopCount {
  template <typename T>
  static U32 Of(T a) {
    return static_cast<U32>(__builtin_popcountll(a));
  }
};
struct LeadingZeros {
  static U32 Of(U32 a) { return a == 0 ? 32 : static_cast<U32>(__builtin_clz(a)); }
  static U32 Of(U64 a) { return a == 0 ? 64 : static_cast<U32>(__builtin_clzll(a)); }
};
struct ReverseBits {
  static U32 Of(U32 a) {
    U32 r = 0;
    for (int k = 0; k < 32; ++k) r |= (a >> k & 1) << (31 - k);
    return r;
  }
};
template <typename F>
Outcome MapPredicates(Warp& w, const Instruction& i) {
  const uint32_t a = w.PredicateValue(i.At(1));
  const uint32_t b = i.NumOperands() > 2 ? w.PredicateValue(i.At(2)) : 0;
  uint32_t& d = w.Predicate(i.At(0));
  d = (d & ~w.active) | (F::Of(a, b) & w.active);
  return Outcome::kDone;
}
struct First {
  static U32 Of(U32 a, U32) { return a; }
};
struct NotFirst {
  static U32 Of(U32 a, U32) { return ~a; }
};

template <typename T>
Outcome InsertBits(Warp& w, const Instruction& i) {
  const T *a = w.Lanes<T>(i, 1), *b = w.Lanes<T>(i, 2);
  const U32 *position = w.Lanes<U32>(i, 3), *length = w.Lanes<U32>(i, 4);
  T* d = w.Lanes<T>(i, 0);
  ForActive(w.active, [=](int l) {
    const U32 p = position[l] & 0xff, n = std::min<U32>(length[l] & 0xff, 64);
    const U64 mask = ShiftLeft::Of(n >= 64 ? ~U64{0} : (U64{1} << n) - 1, p);
    d[l] = static_cast<T>((b[l] & ~mask) | (ShiftLeft::Of(static_cast<U64>(a[l]), p) & mask));
  });
  return Outcome::kDone;
}

template <typename T>
Outcome ExtractBits(Warp& w, const Instruction& i) {
  const T* a = w.Lanes<T>(i, 1);
  const U32 *position = w.Lanes<U32>(i, 2), *length = w.Lanes<U32>(i, 3);
  T* d = w.Lanes<T>(i, 0);
  constexpr U32 kBits = 8 * sizeof(T);
  ForActive(w.active, [=](int l) {
    const U32 p = position[l] & 0xff, n = length[l] & 0xff;
    T value = 0;
    for (U32 k = 0; k < kBits; ++k) {
      U32 from = p + std::min(k, n == 0 ? 0 : n - 1);
      const bool bit = n > 0 && (k < n || std::is_signed_v<T>) &&
                       (a[l] >> std::min(from, kBits - 1) & 1) &&
                       (std::is_signed_v<T> || from < kBits);
      if (bit) value = static_cast<T>(value | static_cast<T>(T{1} << k));
    }
    d[l] = value;
  });
  return Outcome::kDone;
}

struct Permute {
  static U32 Of(U32 a, U32 b, U32 selector) {
    const U64 bytes = U64{b} << 32 | a;
    U32 d = 0;
    for (int k = 0; k < 4; ++k) {
      const U32 s = selector >> (4 * k) & 0xf;
      U32 byte = static_cast<U32>(bytes >> (8 * (s & 7)) & 0xff);
      if (s & 8) byte = byte & 0x80 ? 0xff : 0;
      d |= byte << (8 * k);
    }
    return d;
  }
};
// Any function of three bits; the table is the last operand.
Outcome LookUp3(Warp& w, const Instruction& i) {
  const U32 *a = w.Lanes<U32>(i, 1), *b = w.Lanes<U32>(i, 2), *c = w.Lanes<U32>(i, 3),
            *table = w.Lanes<U32>(i, 4);
  U32* d = w.Lanes<U32>(i, 0);
  ForActive(w.active, [=](int l) {
    U32 value = 0;
    for (int k = 0; k < 32; ++k) {
      const U32 index = (a[l] >> k & 1) << 2 | (b[l] >> k & 1) << 1 | (c[l] >> k & 1);
      value |= (table[l] >> index & 1) << k;
    }
    d[l] = value;
  });
  return Outcome::kDone;
}
template <bool kLeft>
struct Funnel {
  static U32 Of(U32 low, U32 high, U32 c) {
    const U64 both = U64{high} << 32 | low;
    return static_cast<U32>(kLeft ? both << (c & 31) >> 32 : both >> (c & 31));
  }
};

// Integers of any size to any size. A register may be wider than its type.
template <typename D, typename A>
Outcome ConvertInteger(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int l) {
    const U64 value = static_cast<U64>(static_cast<S64>(static_cast<A>(w.Integer(i.At(1), l))));
    const D d = static_cast<D>(value);
    const Operand& to = i.At(0);
    const U64 extended = static_cast<U64>(static_cast<S64>(d));
    if (to.size == 2)
      w.Lanes<U16>(to)[l] = static_cast<U16>(extended);
    else if (to.size == 4)
      w.Lanes<U32>(to)[l] = static_cast<U32>(extended);
    else
      w.Lanes<U64>(to)[l] = extended;
  });
  return Outcome::kDone;
}
Outcome Branch(Warp&, const Instruction&) { return Outcome::kBranch; }
Outcome Exit(Warp&, const Instruction&) { return Outcome::kExit; }
Outcome ExecuteTrap(Warp&, const Instruction&) { Fail("trap"); }

// Addresses of global memory are the same as generic ones. Shared memory lies in a window.
template <uint64_t window>
Outcome ToWindow(Warp& w, const Instruction& i) {
  U64* d = w.Lanes<U64>(i, 0);
  ForActive(w.active, [&](int l) { d[l] = w.Integer(i.At(1), l) + window; });
  return Outcome::kDone;
}
template <uint64_t window>
Outcome FromWindow(Warp& w, const Instruction& i) {
  U64* d = w.Lanes<U64>(i, 0);
  ForActive(w.active, [&](int l) { d[l] = w.Integer(i.At(1), l) - window; });
  return Outcome::kDone;
}

template <typename S, typename U>
void AddIntegersOfSize(Table* t, const std::string& bits) {
  const std::string s = ".s" + bits, u = ".u" + bits, b = ".b" + bits;
  for (const std::string& type : {s, u}) {
    (*t)["add" + type] = Map2<U, U, Add>;
    (*t)["sub" + type] = Map2<U, U, Sub>;
    (*t)["mul.lo" + type] = Map2<U, U, Mul>;
    (*t)["mad.lo" + type] = Map3<U, U, MulAdd>;
    (*t)["neg" + type] = Map1<U, U, Neg>;
    (*t)["selp" + type] = Select<U>;
    (*t)["mov" + type] = Move<U>;
    (*t)["setp.eq" + type] = Compare<U, Equal>;
    (*t)["setp.ne" + type] = Compare<U, NotEqual>;
  }
  (*t)["abs" + s] = Map1<S, S, Abs>;
  (*t)["mul.hi" + s] = Map2<S, S, MulHigh>;
  (*t)["mul.hi" + u] = Map2<U, U, MulHigh>;
  (*t)["div" + s] = Map2<S, S, Div>;
  (*t)["div" + u] = Map2<U, U, Div>;
  (*t)["rem" + s] = Map2<S, S, Rem>;
  (*t)["rem" + u] = Map2<U, U, Rem>;
  (*t)["min" + s] = Map2<S, S, Min>;
  (*t)["min" + u] = Map2<U, U, Min>;
  (*t)["max" + s] = Map2<S, S, Max>;
  (*t)["max" + u] = Map2<U, U, Max>;
  (*t)["shl" + b] = Map2<U, U, ShiftLeft, U32>;
  (*t)["shr" + s] = Map2<S, S, ShiftRight, U32>;
  (*t)["shr" + u] = (*t)["shr" + b] = Map2<U, U, ShiftRight, U32>;
  (*t)["and" + b] = Map2<U, U, And>;
  (*t)["or" + b] = Map2<U, U, Or>;
  (*t)["xor" + b] = Map2<U, U, Xor>;
  (*t)["not" + b] = Map1<U, U, Not>;
  (*t)["mov" + b] = Move<U>;
  (*t)["selp" + b] = Select<U>;
  (*t)["setp.eq" + b] = Compare<U, Equal>;
  (*t)["setp.ne" + b] = Compare<U, NotEqual>;
  (*t)["setp.lt" + s] = Compare<S, Less>;
  (*t)["setp.le" + s] = Compare<S, LessEqual>;
  (*t)["setp.gt" + s] = Compare<S, Greater>;
  (*t)["setp.ge" + s] = Compare<S, GreaterEqual>;
  for (const std::string& name : {std::string("lt"), std::string("lo")})
    (*t)["setp." + name + u] = Compare<U, Less>;
  for (const std::string& name : {std::string("le"), std::string("ls")})
    (*t)["setp." + name + u] = Compare<U, LessEqual>;
  for (const std::string& name : {std::string("gt"), std::string("hi")})
    (*t)["setp." + name + u] = Compare<U, Greater>;
  for (const std::string& name : {std::string("ge"), std::string("hs")})
    (*t)["setp." + name + u] = Compare<U, GreaterEqual>;
}

template <typename D>
void AddConversionsTo(Table* t, const std::string& to) {
  (*t)["cvt." + to + ".u8"] = ConvertInteger<D, uint8_t>;
  (*t)["cvt." + to + ".s8"] = ConvertInteger<D, int8_t>;
  (*t)["cvt." + to + ".u16"] = ConvertInteger<D, U16>;
  (*t)["cvt." + to + ".s16"] = ConvertInteger<D, S16>;
  (*t)["cvt." + to + ".u32"] = ConvertInteger<D, U32>;
  (*t)["cvt." + to + ".s32"] = ConvertInteger<D, S32>;
  (*t)["cvt." + to + ".u64"] = ConvertInteger<D, U64>;
  (*t)["cvt." + to + ".s64"] = ConvertInteger<D, S64>;
}

}  // namespace

void AddIntegers(Table* t) {
  AddIntegersOfSize<S16, U16>(t, "16");
  AddIntegersOfSize<S32, U32>(t, "32");
  AddIntegersOfSize<S64, U64>(t, "64");
  AddConversionsTo<uint8_t>(t, "u8");
  AddConversionsTo<int8_t>(t, "s8");
  AddConversionsTo<U16>(t, "u16");
  AddConversionsTo<S16>(t, "s16");
  AddConversionsTo<U32>(t, "u32");
  AddConversionsTo<S32>(t, "s32");
  AddConversionsTo<U64>(t, "u64");
  AddConversionsTo<S64>(t, "s64");
  (*t)["mul.wide.s32"] = Map2<S64, S32, MulWide>;
  (*t)["mul.wide.u32"] = Map2<U64, U32, MulWide>;
  (*t)["mul.wide.s16"] = Map2<S32, S16, MulWide>;
  (*t)["mul.wide.u16"] = Map2<U32, U16, MulWide>;
  (*t)["mad.wide.s32"] = Map3<S64, S32, MulAddWide, S64>;
  (*t)["mad.wide.u32"] = Map3<U64, U32, MulAddWide, U64>;
  (*t)["max.u16x2"] = Map2<U32, U32, Halves<Max>>;
  (*t)["popc.b32"] = Map1<U32, U32, PopCount>;
  (*t)["popc.b64"] = Map1<U32, U64, PopCount>;
  (*t)["clz.b32"] = Map1<U32, U32, LeadingZeros>;
  (*t)["clz.b64"] = Map1<U32, U64, LeadingZeros>;
  (*t)["brev.b32"] = Map1<U32, U32, ReverseBits>;
  (*t)["bfi.b32"] = InsertBits<U32>;
  (*t)["bfi.b64"] = InsertBits<U64>;
  (*t)["bfe.u32"] = ExtractBits<U32>;
  (*t)["bfe.s32"] = ExtractBits<S32>;
  (*t)["bfe.u64"] = ExtractBits<U64>;
  (*t)["prmt.b32"] = Map3<U32, U32, Permute>;
  (*t)["lop3.b32"] = LookUp3;
  (*t)["shf.l.wrap.b32"] = Map3<U32, U32, Funnel<true>>;
  (*t)["shf.r.wrap.b32"] = Map3<U32, U32, Funnel<false>>;

  (*t)["and.pred"] = MapPredicates<And>;
  (*t)["or.pred"] = MapPredicates<Or>;
  (*t)["xor.pred"] = MapPredicates<Xor>;
  (*t)["not.pred"] = MapPredicates<NotFirst>;
  (*t)["mov.pred"] = MapPredicates<First>;

  (*t)["bra"] = (*t)["bra.uni"] = Branch;
  (*t)["ret"] = (*t)["exit"] = Exit;
  (*t)["trap"] = ExecuteTrap;
  for (const char* name :
       {"cvta.to.global.u64", "cvta.global.u64", "cvta.to.const.u64", "cvta.u64"}) {
    (*t)[name] = Map1<U64, U64, Copy>;
  }
  (*t)["cvta.shared.u64"] = ToWindow<kSharedWindow>;
  (*t)["cvta.to.shared.u64"] = FromWindow<kSharedWindow>;
  (*t)["cvta.param.u64"] = ToWindow<kParamWindow>;
  (*t)["cvta.local.u64"] = ToWindow<kLocalWindow>;
  (*t)["cvta.to.local.u64"] = FromWindow<kLocalWindow>;
}

}  // namespace emulated_gpu
