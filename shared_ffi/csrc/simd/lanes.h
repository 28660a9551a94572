// Loads and stores of vectors, and what moves numbers between lanes.
#pragma once

#include <cstring>
#include <utility>

// The file of the instruction set that is compiled for.
#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#elif defined(__aarch64__)
#include "neon.h"
#else
#include "portable.h"
namespace xla_gpu {
namespace {
using namespace portable;
}
}  // namespace xla_gpu
#endif

namespace xla_gpu {
namespace {

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

// Loads the first num_bytes of a vector; the rest is zero.
template <typename V>
XLA_GPU_INLINE V LoadPart(const void* from, int64_t num_bytes) {
  // A part is stored and loaded again as a whole, which waits for the store. Not so these.
  if constexpr (sizeof(V) == 16) {
    if (num_bytes == 8) return BitCast<V>(WordPair{Load<uint64_t>(from), 0});
    if (num_bytes == 4) return BitCast<V>(WordPair{Load<uint32_t>(from), 0});
  } else if constexpr (sizeof(V) == 8) {
    if (num_bytes == 4) return BitCast<V>(uint64_t{Load<uint32_t>(from)});
  }
  V to = {};
  std::memcpy(&to, from, num_bytes);
  return to;
}

XLA_GPU_INLINE Lanes Splat(float x) { return x - Lanes{}; }

XLA_GPU_INLINE Lanes Max(Lanes a, Lanes b) { return a > b ? a : b; }

template <int... i>
XLA_GPU_INLINE Mask Indices(std::integer_sequence<int, i...>) {
  return Mask{i...};
}

// Each lane holds its own index.
XLA_GPU_INLINE Lanes LaneNumbers() {
  return __builtin_convertvector(Indices(std::make_integer_sequence<int, kLanes>()), Lanes);
}

// True in lanes whose index is at least begin and less than end.
XLA_GPU_INLINE Mask LanesIn(int64_t begin, int64_t end) {
  const Mask indices = Indices(std::make_integer_sequence<int, kLanes>());
  return (indices >= static_cast<int32_t>(begin)) & (indices < static_cast<int32_t>(end));
}

// Lane i of the result is lane From::Of(i) of a, or lane From::Of(i) - (lanes of a) of b.
template <typename From, typename V, int... i>
XLA_GPU_INLINE V Shuffle(V a, V b, std::integer_sequence<int, i...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, From::Of(i)...);
#else
  return __builtin_shuffle(a, b,
                           V{static_cast<std::remove_reference_t<decltype(a[0])>>(From::Of(i))...});
#endif
}

template <typename From>
XLA_GPU_INLINE Words Shuffle(Words a, Words b) {
  return Shuffle<From>(a, b, std::make_integer_sequence<int, kLanes>());
}

struct InTurns {
  static constexpr int Of(int i) { return i / 2 + i % 2 * 16; }
};

// The first 8 bytes of both vectors in turns.
XLA_GPU_INLINE Bytes16 Interleave(Bytes16 a, Bytes16 b) {
  return Shuffle<InTurns>(a, b, std::make_integer_sequence<int, 16>());
}

template <int kDistance>
struct Exchanged {
  static constexpr int Of(int i) { return i ^ kDistance; }
};

// Combines all lanes in a fixed tree; every lane holds the result.
template <int kDistance = kLanes / 2, typename Combine>
XLA_GPU_INLINE Lanes Reduce(Lanes x, Combine combine) {
  const Words words = BitCast<Words>(x);
  x = combine(x, BitCast<Lanes>(Shuffle<Exchanged<kDistance>>(words, words)));
  if constexpr (kDistance > 1) return Reduce<kDistance / 2>(x, combine);
  return x;
}

// Every lane holds the largest of all.
XLA_GPU_INLINE Lanes MaxOfLanes(Lanes x) {
  return Reduce(x, [](Lanes a, Lanes b) { return Max(a, b); });
}

XLA_GPU_INLINE float SumOfLanes(Lanes x) {
  return Reduce(x, [](Lanes a, Lanes b) { return a + b; })[0];
}

// Takes every other block of kSize lanes, first from a, then from b. For kSize up to 2 it stays
// within 128 bits, where one instruction does it.
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

// The vector that lane i of SumEach is a sum of. Where vectors hold two rows, the first four lanes
// are sums of the first rows, the next four of the second rows of the same vectors, and so on.
constexpr int PlaceOf(int i) {
  constexpr int kOfLane[] = {0, 2, 1, 3};
  return i / (4 * kRowsPerVector) * 4 + kOfLane[i % 4];
}

// The n-th leaf of SumEach's tree of additions is this chain.
constexpr int ChainOfLeaf(int n) {
  int chain = 0;
  for (int bit = 1; bit < kChains; bit *= 2) chain = chain * 2 + (n / bit & 1);
  return chain;
}

// Sums the chains of each row of each of kChains vectors, all by the same tree. Overwrites the
// vectors.
template <int kSize = kChains / 2>
XLA_GPU_INLINE Lanes SumEach(Lanes (&x)[kChains]) {
#pragma GCC unroll 8
  for (int i = 0; i < kSize; ++i) x[i] = AddNeighbours<kSize>(x[i], x[i + kSize]);
  if constexpr (kSize > 1) {
    return SumEach<kSize / 2>(x);
  } else {
    return x[0];
  }
}

// One step of a transpose: swaps the two squares of kSize by kSize off the diagonal of each square
// of twice that size.
template <int kSize, bool kFirst>
struct Swapped {
  static constexpr int Of(int i) {
    const bool is_low = (i & kSize) == 0;
    if (kFirst) return is_low ? i : (i ^ kSize) + kLanes;
    return is_low ? i ^ kSize : i + kLanes;
  }
};

// Transposes: x[i][j] becomes x[j][i].
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

}  // namespace
}  // namespace xla_gpu
