// What the CPU kernels ask of a processor's vector unit. A kernel that includes this is compiled
// once for each instruction set (see cmake/cpu.cmake): everything here and in the kernel has
// internal linkage, so that the linker cannot give one instruction set's copy of a function to
// another.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "storage.h"

namespace xla_gpu {
namespace {

// A vector register of float, and of the same bits as integers.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * kLanes)));
typedef int16_t SignedHalfWords __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

// Registers that a block of sums may take besides what it reads: rows of so many vectors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockRows = 4, kBlockVectors = 4;
#else
constexpr int kBlockRows = 6, kBlockVectors = 2;
#endif

template <typename V>
XLA_GPU_INLINE V Load(const void* from) {
  V to;
  std::memcpy(&to, from, sizeof(V));
  return to;
}

template <typename V>
XLA_GPU_INLINE void Store(const V& from, void* to) {
  std::memcpy(to, &from, sizeof(V));
}

// The first num_bytes of a vector, zero after them.
template <typename V>
XLA_GPU_INLINE V LoadPart(const void* from, int64_t num_bytes) {
  V to = {};
  std::memcpy(&to, from, num_bytes);
  return to;
}

XLA_GPU_INLINE Lanes Splat(float x) { return x - Lanes{}; }

// a * b + c, rounded once where the instruction set can.
XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

XLA_GPU_INLINE Lanes Max(Lanes a, Lanes b) { return a > b ? a : b; }

template <int... i>
XLA_GPU_INLINE Mask Indices(std::integer_sequence<int, i...>) {
  return Mask{i...};
}

// In each lane its index.
XLA_GPU_INLINE Lanes LaneNumbers() {
  return __builtin_convertvector(Indices(std::make_integer_sequence<int, kLanes>()), Lanes);
}

// Whether a lane's index is at least begin and less than end.
XLA_GPU_INLINE Mask LanesIn(int64_t begin, int64_t end) {
  const Mask indices = Indices(std::make_integer_sequence<int, kLanes>());
  return (indices >= static_cast<int32_t>(begin)) & (indices < static_cast<int32_t>(end));
}

// Lane i of the result is lane From::Of(i) of a, or lane From::Of(i) - kLanes of b.
template <typename From, int... i>
XLA_GPU_INLINE Words Shuffle(Words a, Words b, std::integer_sequence<int, i...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, From::Of(i)...);
#else
  return __builtin_shuffle(a, b, Words{static_cast<uint32_t>(From::Of(i))...});
#endif
}

template <typename From>
XLA_GPU_INLINE Words Shuffle(Words a, Words b) {
  return Shuffle<From>(a, b, std::make_integer_sequence<int, kLanes>());
}

template <int kDistance>
struct Exchanged {
  static constexpr int Of(int i) { return i ^ kDistance; }
};

// x combined with itself, lane by lane in a fixed tree, until all lanes are the same.
template <int kDistance = kLanes / 2, typename Combine>
XLA_GPU_INLINE Lanes Reduce(Lanes x, Combine combine) {
  const Words words = BitCast<Words>(x);
  x = combine(x, BitCast<Lanes>(Shuffle<Exchanged<kDistance>>(words, words)));
  if constexpr (kDistance > 1) return Reduce<kDistance / 2>(x, combine);
  return x;
}

// In every lane the largest of all.
XLA_GPU_INLINE Lanes MaxOfLanes(Lanes x) {
  return Reduce(x, [](Lanes a, Lanes b) { return Max(a, b); });
}

XLA_GPU_INLINE float SumOfLanes(Lanes x) {
  return Reduce(x, [](Lanes a, Lanes b) { return a + b; })[0];
}

// Blocks of kSize lanes, those at even or at odd places: first of a, then of b; for kSize up to 2
// within 128 bits, where there is an instruction for it.
template <int kSize, int kOdd>
struct EveryOther {
  static constexpr int Of(int i) {
    constexpr int kWidth = kSize > 2 ? kLanes : 4;
    constexpr int kOfEach = kWidth / kSize / 2;
    const int place = i % kWidth / kSize;
    const int block = place % kOfEach * 2 + kOdd;
    return i / kWidth * kWidth + block * kSize + i % kSize + place / kOfEach * kLanes;
  }
};

template <int kSize>
XLA_GPU_INLINE Lanes AddNeighbours(Lanes a, Lanes b) {
  const Words x = BitCast<Words>(a), y = BitCast<Words>(b);
  return BitCast<Lanes>(Shuffle<EveryOther<kSize, 0>>(x, y)) +
         BitCast<Lanes>(Shuffle<EveryOther<kSize, 1>>(x, y));
}

// Lane i of SumEach is the sum of the vector at this place.
constexpr int PlaceOf(int i) {
  constexpr int kOf128Bits[] = {0, 8, 4, 12}, kOfLane[] = {0, 2, 1, 3};
  return kOf128Bits[i / 4] * kLanes / 16 + kOfLane[i % 4];
}

// The order of lanes in which neighbours, neighbours' sums and so on are those that SumEach adds.
constexpr int LaneOfLeaf(int n) {
  int lane = 0;
  for (int bit = 1; bit < kLanes; bit *= 2) lane = lane * 2 + (n / bit & 1);
  return lane;
}

// The sums over the lanes of each of kLanes vectors, each by the same tree. Overwrites the vectors.
template <int kSize = kLanes / 2>
XLA_GPU_INLINE Lanes SumEach(Lanes (&x)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < kSize; ++i) x[i] = AddNeighbours<kSize>(x[i], x[i + kSize]);
  if constexpr (kSize > 1) {
    return SumEach<kSize / 2>(x);
  } else {
    return x[0];
  }
}

// Swaps the squares of kSize lanes and vectors that lie off the diagonal of each square of twice
// their size.
template <int kSize, bool kFirst>
struct Swapped {
  static constexpr int Of(int i) {
    const bool is_low = (i & kSize) == 0;
    if (kFirst) return is_low ? i : (i ^ kSize) + kLanes;
    return is_low ? i ^ kSize : i + kLanes;
  }
};

// x[i][j] becomes x[j][i].
template <int kSize = kLanes / 2>
XLA_GPU_INLINE void Transpose(Lanes (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kSize) continue;
    const Words a = BitCast<Words>(x[i]), b = BitCast<Words>(x[i + kSize]);
    x[i] = BitCast<Lanes>(Shuffle<Swapped<kSize, true>>(a, b));
    x[i + kSize] = BitCast<Lanes>(Shuffle<Swapped<kSize, false>>(a, b));
  }
  if constexpr (kSize > 1) Transpose<kSize / 2>(x);
}

// kLanes numbers in storage, of which the first `count` exist; the others are zero.
XLA_GPU_INLINE Lanes LoadWide(const float* from, int64_t count) {
  return count >= kLanes ? Load<Lanes>(from) : LoadPart<Lanes>(from, 4 * count);
}

XLA_GPU_INLINE HalfWords LoadHalfWords(const void* from, int64_t count) {
  return count >= kLanes ? Load<HalfWords>(from) : LoadPart<HalfWords>(from, 2 * count);
}

XLA_GPU_INLINE Words Widen(HalfWords x) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

XLA_GPU_INLINE Lanes LoadWide(const BFloat16* from, int64_t count) {
  return BitCast<Lanes>(Widen(LoadHalfWords(from, count)) << 16);
}

XLA_GPU_INLINE Lanes WidenHalf(HalfWords x) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (Lanes)vcvt_f32_f16((float16x4_t)x);
#else
  // The exponent is rebased by a multiplication, exact also for binary16's subnormals.
  const Words bits = Widen(x), magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const Words finite = BitCast<Words>(BitCast<Lanes>(magnitude) * 0x1p112f);
  return BitCast<Lanes>(sign | (magnitude < 0x0f800000u ? finite : magnitude | 0x7f800000u));
#endif
}

XLA_GPU_INLINE Lanes LoadWide(const Half* from, int64_t count) {
  return WidenHalf(LoadHalfWords(from, count));
}

XLA_GPU_INLINE Bytes LoadBytes(const void* from, int64_t count) {
  return count >= kLanes ? Load<Bytes>(from) : LoadPart<Bytes>(from, count);
}

// With their signs. (GCC 12 makes thirty instructions of a conversion from eight bytes.)
XLA_GPU_INLINE HalfWords WidenBytes(Bytes x) {
#if defined(__AVX512F__)
  return (HalfWords)_mm256_cvtepi8_epi16((__m128i)x);
#elif defined(__AVX2__)
  return (HalfWords)_mm_cvtepi8_epi16(_mm_cvtsi64_si128(BitCast<int64_t>(x)));
#else
  return (HalfWords) __builtin_convertvector((SignedBytes)x, SignedHalfWords);
#endif
}

XLA_GPU_INLINE Lanes LoadWide(const Float8E5M2* from, int64_t count) {
  return WidenHalf(WidenBytes(LoadBytes(from, count)) << 8);
}

// By way of binary16, which has E4M3's subnormals as numbers of its own. NaN becomes the usual one:
// torch_xla hands arrays of binary16 over with all their NaNs replaced by it.
XLA_GPU_INLINE Lanes LoadWide(const Float8E4M3* from, int64_t count) {
  const HalfWords x = WidenBytes(LoadBytes(from, count));
  const HalfWords magnitude = x & 0x7f, nan = magnitude - magnitude + 0x7e00;
  const HalfWords half = magnitude == 0x7f ? nan : magnitude << 7;
  return WidenHalf(half | (x & 0x80) << 8) * 256.0f;
}

XLA_GPU_INLINE Lanes LoadWide(const int8_t* from, int64_t count) {
  const Bytes x = LoadBytes(from, count);
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)x));
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(BitCast<int64_t>(x))));
#else
  return __builtin_convertvector(__builtin_convertvector((SignedBytes)x, Mask), Lanes);
#endif
}

XLA_GPU_INLINE Lanes Narrow(Lanes x, float) { return x; }

XLA_GPU_INLINE HalfWords Narrow(Lanes x, BFloat16) {
  const Words bits = BitCast<Words>(x);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet_nan = bits >> 16 | 0x0040;
  return __builtin_convertvector(x != x ? quiet_nan : rounded, HalfWords);
}

XLA_GPU_INLINE HalfWords Narrow(Lanes x, Half) {
#if defined(__AVX512F__)
  return (HalfWords)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (HalfWords)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (HalfWords)vcvt_f16_f32((float32x4_t)x);
#else
  Half narrow[kLanes];
  for (int i = 0; i < kLanes; ++i) FromFloat(x[i], narrow + i);
  return Load<HalfWords>(narrow);
#endif
}

// x in storage, of which the first `count` numbers exist. Rounds to nearest, ties to even;
// overflows to infinity; a NaN stays a (quiet) NaN.
template <typename T>
XLA_GPU_INLINE void StoreNarrow(Lanes x, T* to, int64_t count) {
  const auto narrow = Narrow(x, T());
  if (count >= kLanes) {
    Store(narrow, to);
  } else {
    std::memcpy(to, &narrow, count * sizeof(T));
  }
}

// Stores vectors of columns in the columns' order. Dot::LoadDown has kVectors times four of them in
// the vectors' first four lanes, first those of the first vector; then come the second four lanes.
template <int kVectors>
XLA_GPU_INLINE void StoreInOrder(const Lanes (&x)[kVectors], float* to) {
  const float* from = reinterpret_cast<const float*>(x);
  for (int i = 0; i < kLanes; i += 4) {
    for (int v = 0; v < kVectors; ++v, to += 4) std::memcpy(to, from + v * kLanes + i, 16);
  }
}

// How products of numbers in storage are summed: kPerLane of them at once in each lane.
template <typename T>
struct Dot {
  static constexpr int kPerLane = 1;
  static constexpr int kAcross = 1;  // vectors that Load loads
  static constexpr int kDown = 1;    // vectors that LoadDown loads

  // Neighbours in a row: the numbers at `from`, of which `count` exist; the others are zero.
  static XLA_GPU_INLINE void Load(const T* from, int64_t count, Lanes* to) {
    to[0] = LoadWide(from, count);
  }

  // What these are multiplied by, in the same order.
  template <typename Query>
  static XLA_GPU_INLINE void LoadQuery(const Query* from, int64_t count, Lanes* to) {
    to[0] = LoadWide(from, count);
  }

  // Neighbours in a column: those at `from`, and in the rows after it. The columns, of which
  // `count` exist, are in the order that StoreInOrder expects.
  static XLA_GPU_INLINE void LoadDown(const T* const (&from)[1], int64_t count, Lanes* to) {
    to[0] = LoadWide(from[0], count);
  }

  // Stores factors as numbers i and on of `to`, and returns them as they were stored.
  static XLA_GPU_INLINE Lanes StoreFactors(Lanes factors, float* to, int64_t i) {
    Store(factors, to + i);
    return factors;
  }

  static XLA_GPU_INLINE Lanes Multiply(Lanes a, Lanes b) { return a * b; }
  static XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes sums) {
    return xla_gpu::MultiplyAdd(a, b, sums);
  }

  // Whether no number is infinite or NaN: 0 in each lane.
  static XLA_GPU_INLINE Lanes TimesZero(Lanes x) { return x * 0.0f; }
};

#ifdef __AVX512BF16__
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

  static XLA_GPU_INLINE void Load(const BFloat16* from, int64_t count, Lanes* to) {
    to[0] = BitCast<Lanes>(LoadWords(from, 2 * count));
  }

  static XLA_GPU_INLINE void LoadQuery(const BFloat16* from, int64_t count, Lanes* to) {
    Load(from, count, to);
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

  // Each number is widened, multiplied exactly and added in float.
  static XLA_GPU_INLINE Lanes MultiplyAdd(Lanes a, Lanes b, Lanes sums) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
  }

  static XLA_GPU_INLINE Lanes TimesZero(Lanes x) {
    const Words words = BitCast<Words>(x);
    return BitCast<Lanes>(words << 16) * 0.0f + BitCast<Lanes>(words & 0xffff0000u) * 0.0f;
  }
};
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define XLA_GPU_PAIRS_BYTES

// Caches of 8 bits under bfloat16 queries: all their numbers are bfloat16s, too, two in each lane.
struct PairedFloat8E4M3 {
  uint8_t bits;
};
struct PairedFloat8E5M2 {
  uint8_t bits;
};
struct PairedInt8 {
  int8_t value;
};

// The bfloat16s that magnitudes of 8 bits stand for, a table for each of their bytes.
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
  return BFloat16Of<7, -6, 256, -1>(magnitude);  // integers as subnormal numbers in units of 1
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

// The bfloat16s that 64 bytes stand for: the first and the last 8 of each 16.
template <typename T>
XLA_GPU_INLINE void WidenBytesInPairs(__m512i x, Lanes* to) {
  constexpr bool kIsInt8 = std::is_same_v<T, PairedInt8>;
  const auto& table = kBFloat16Table<T>;
  const __m512i magnitude = kIsInt8 ? _mm512_abs_epi8(x) : x;
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(table.low), magnitude,
                                               _mm512_load_si512(table.low + 64));
  __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(table.high), magnitude,
                                          _mm512_load_si512(table.high + 64));
  if constexpr (kIsInt8) {  // 128 is not in the table, and 0 in its place
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

  static XLA_GPU_INLINE void Load(const T* from, int64_t count, Lanes* to) {
    WidenBytesInPairs<T>((__m512i)LoadWords(from, count), to);
  }

  static XLA_GPU_INLINE void LoadQuery(const BFloat16* from, int64_t count, Lanes* to) {
    const Words first = LoadWords(from, 2 * count);
    const Words second = LoadWords(from + 2 * kLanes, 2 * (count - 2 * kLanes));
    to[0] = BitCast<Lanes>(Shuffle<EveryOther<4, 0>>(first, second));
    to[1] = BitCast<Lanes>(Shuffle<EveryOther<4, 1>>(first, second));
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

// 2^x for x < 128 or NaN, within 2 ulp; 0 where 2^x would be subnormal. x = n + f with 0 <= f <= 1;
// 2^f by the polynomial of degree 6, exact at 0, whose largest relative error is least: 2^-28.9.
XLA_GPU_INLINE Lanes Exp2(Lanes x) {
#if defined(__AVX512F__)
  const Lanes f = (Lanes)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
  const Lanes shifted = x - 0.5f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const Lanes f = x - (shifted - 12582912.0f);
#endif
  Lanes e = Splat(2.1612928e-4f);
  e = MultiplyAdd(e, f, Splat(1.2467842e-3f));
  e = MultiplyAdd(e, f, Splat(9.675452e-3f));
  e = MultiplyAdd(e, f, Splat(5.5485282e-2f));
  e = MultiplyAdd(e, f, Splat(2.4022931e-1f));
  e = MultiplyAdd(e, f, Splat(6.9314706e-1f));
  e = MultiplyAdd(e, f, Splat(1.0f));
#if defined(__AVX512F__)
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_US);
  return (Lanes)_mm512_maskz_scalef_ps(is_normal, (__m512)e, (__m512)x);
#else
  const Words exponent = (BitCast<Words>(shifted) + 127) << 23;
  return x < -126.0f ? Lanes{} : e * BitCast<Lanes>(exponent);
#endif
}

// tanh(x), within 2^-23 of it.
XLA_GPU_INLINE Lanes Tanh(Lanes x) {
  const Lanes magnitude = x < 0 ? -x : x;
  const Lanes e = Exp2(magnitude * -2.88539008f);  // e^(-2 |x|)
  const Lanes tanh = (1.0f - e) / (1.0f + e);
  return x < 0 ? -tanh : tanh;
}

}  // namespace
}  // namespace xla_gpu
