// Dot for bfloat16 with AVX-512's own products of pairs, and for caches of 8 bits under bfloat16
// queries, whose numbers are all bfloat16s, too.
#pragma once

#include <type_traits>

#include "dot.h"

namespace xla_gpu {
namespace {

XLA_GPU_INLINE Words LoadWords(const void* from, int64_t num_bytes) {
  constexpr int64_t kBytes = sizeof(Words);
  if (num_bytes >= kBytes) return Load<Words>(from);
  return num_bytes > 0 ? LoadPart<Words>(from, num_bytes) : Words{};
}

template <>
struct Dot<BFloat16> {
  static constexpr int kPerLane = 2;
  static constexpr int kAcross = 1;
  static constexpr int kDown = 2;

  template <int kRows>
  static XLA_GPU_INLINE void Load(const void* const (&rows)[kRows], int64_t count, Lanes* to) {
    to[0] = BitCast<Lanes>(LoadRows<Words>(rows, 2 * count));
  }

  static XLA_GPU_INLINE void LoadQuery(const BFloat16* from, int64_t count, Lanes* to) {
    to[0] = BitCast<Lanes>(LoadWords(from, 2 * count));
  }

  static XLA_GPU_INLINE void LoadDown(const BFloat16* const (&from)[2], int64_t count, Lanes* to) {
    const auto first = (__m512i)LoadWords(from[0], 2 * count);
    const auto second = (__m512i)LoadWords(from[1], 2 * count);
    to[0] = (Lanes)_mm512_unpacklo_epi16(first, second);
    to[1] = (Lanes)_mm512_unpackhi_epi16(first, second);
  }

  static XLA_GPU_INLINE Lanes StoreFactors(Lanes factors, float* to, int64_t i) {
    const HalfWords narrow = (HalfWords)_mm512_cvtneps_pbh((__m512)factors);
    Store(narrow, reinterpret_cast<HalfWords*>(to) + i / kLanes);
    return BitCast<Lanes>(Widen(narrow) << 16);
  }

  static XLA_GPU_INLINE Lanes Multiply(Lanes a, Lanes b) { return MultiplyAdd(a, b, Lanes{}); }

  // Products are exact; sums are float.
  static XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes sums) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
  }

  static XLA_GPU_INLINE Lanes TimesZero(Lanes x) {
    const Words words = BitCast<Words>(x);
    return BitCast<Lanes>(words << 16) * 0.0f + BitCast<Lanes>(words & 0xffff0000u) * 0.0f;
  }
};

#ifdef __AVX512VBMI__
#define XLA_GPU_PAIRS_BYTES

// The 8-bit types as pairs of bfloat16 in each lane.
struct PairedFloat8E4M3 {
  uint8_t bits;
};
struct PairedFloat8E5M2 {
  uint8_t bits;
};
struct PairedInt8 {
  int8_t value;
};

// The bfloat16 that each magnitude of 8 bits stands for, split into its low and its high byte.
template <typename T>
struct BFloat16Table {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

// Magnitudes from kFirstSpecial on are infinite or NaN.
template <int kMantissaBits, int kBias, int kFirstSpecial, int kInfinity>
constexpr uint16_t BFloat16Of(int magnitude) {
  if (magnitude >= kFirstSpecial) return magnitude == kInfinity ? 0x7f80 : 0x7fc0;
  int mantissa = magnitude & ((1 << kMantissaBits) - 1), exponent = magnitude >> kMantissaBits;
  if (exponent == 0) {
    if (mantissa == 0) return 0;
    exponent = 1;
    while (mantissa >> kMantissaBits == 0) {
      mantissa *= 2;
      --exponent;
    }
    mantissa &= (1 << kMantissaBits) - 1;
  }
  return static_cast<uint16_t>((exponent - kBias + 127) << 7 | mantissa << (7 - kMantissaBits));
}

constexpr uint16_t AsBFloat16(PairedFloat8E4M3, int magnitude) {
  return BFloat16Of<3, 7, 0x7f, -1>(magnitude);
}
constexpr uint16_t AsBFloat16(PairedFloat8E5M2, int magnitude) {
  return BFloat16Of<2, 15, 0x7c, 0x7c>(magnitude);
}
constexpr uint16_t AsBFloat16(PairedInt8, int magnitude) {
  return BFloat16Of<7, -6, 256, -1>(magnitude);  // integers are subnormals in units of 1
}

template <typename T>
constexpr BFloat16Table<T> MakeTable() {
  BFloat16Table<T> table = {};
  for (int i = 0; i < 128; ++i) {
    table.low[i] = static_cast<uint8_t>(AsBFloat16(T{}, i));
    table.high[i] = static_cast<uint8_t>(AsBFloat16(T{}, i) >> 8);
  }
  return table;
}

template <typename T>
constexpr BFloat16Table<T> kBFloat16Table = MakeTable<T>();

// Widens 64 bytes to bfloat16: to[0] gets the first 8 of each 16, to[1] the last 8.
template <typename T>
XLA_GPU_INLINE void WidenBytesInPairs(__m512i x, Lanes* to) {
  constexpr bool kIsInt8 = std::is_same_v<T, PairedInt8>;
  const auto& table = kBFloat16Table<T>;
  const __m512i magnitude = kIsInt8 ? _mm512_abs_epi8(x) : x;
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), magnitude,
                                               _mm512_load_si512(table.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), magnitude,
                                          _mm512_load_si512(table.high + 64));
  if constexpr (kIsInt8) {  // the table ends at 127 and gives 0 for -128
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(magnitude),
                                _mm512_set1_epi8(AsBFloat16(T{}, 128) >> 8));
  }
  const __m512i sign = _mm512_set1_epi8(static_cast<int8_t>(0x80));
  high = _mm512_ternarylogic_epi32(high, x, sign, 0xf8);  // high | (x & sign)
  to[0] = (Lanes)_mm512_unpacklo_epi8(low, high);
  to[1] = (Lanes)_mm512_unpackhi_epi8(low, high);
}

template <typename T>
struct DotOfPairedBytes : Dot<BFloat16> {
  static constexpr int kAcross = 2;
  static constexpr int kDown = 4;

  template <int kRows>
  static XLA_GPU_INLINE void Load(const void* const (&rows)[kRows], int64_t count, Lanes* to) {
    WidenBytesInPairs<T>((__m512i)LoadRows<Words>(rows, count), to);
  }

  // WidenBytesInPairs gives the first two of these in its first vector's first kChains lanes.
  static XLA_GPU_INLINE void LoadQuery(const BFloat16* from, int64_t count, Lanes* to) {
    for (int i = 0; i < kAcross; ++i, from += 2 * kLanes, count -= 2 * kLanes) {
      const auto x = (__m512i)LoadWords(from, 2 * count);
      to[i] = (Lanes)_mm512_shuffle_i64x2(x, x, _MM_SHUFFLE(3, 1, 2, 0));
    }
  }

  static XLA_GPU_INLINE void LoadDown(const T* const (&from)[2], int64_t count, Lanes* to) {
    const auto first = (__m512i)LoadWords(from[0], count);
    const auto second = (__m512i)LoadWords(from[1], count);
    WidenBytesInPairs<T>(_mm512_unpacklo_epi8(first, second), to);
    WidenBytesInPairs<T>(_mm512_unpackhi_epi8(first, second), to + 2);
  }
};

template <>
struct Dot<PairedFloat8E4M3> : DotOfPairedBytes<PairedFloat8E4M3> {};
template <>
struct Dot<PairedFloat8E5M2> : DotOfPairedBytes<PairedFloat8E5M2> {};
template <>
struct Dot<PairedInt8> : DotOfPairedBytes<PairedInt8> {};
#endif

}  // namespace
}  // namespace xla_gpu
