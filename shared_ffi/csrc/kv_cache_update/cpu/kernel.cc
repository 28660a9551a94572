#include "kernel.h"

#include "../../simd/simd.h"
#include "../hadamard.h"
#include "../norm.h"
#include "../rotary.h"

namespace xla_gpu::kv_cache_update {
namespace {

static_assert(kNormChains % kLanes == 0);

// A number of each chain.
struct Chains {
  Lanes of[kNormChains / kLanes] = {};

  XLA_GPU_INLINE void operator+=(const Chains& other) {
    for (int i = 0; i < kNormChains / kLanes; ++i) of[i] += other.of[i];
  }
};

template <typename T>
float SumOfSquares(const T* x, int64_t count) {
  const int64_t whole = count / kNormChains * kNormChains;
  const int64_t of_lanes = count / kNormLanes * kNormLanes;
  ChainSum<Chains> chains;
  for (int64_t first = 0; first < whole; first += kNormChains) {
    Chains squares;
    for (int i = 0; i < kNormChains / kLanes; ++i) {
      const Lanes numbers = LoadWide(x + first + i * kLanes, kLanes);
      squares.of[i] = numbers * numbers;
    }
    chains.Add(squares);
  }
  float sums[kNormChains];
  Store(chains.Sum(), sums);
  const auto square = [x](int64_t i) { return ToFloat(x[i]) * ToFloat(x[i]); };
  for (int64_t i = whole; i < of_lanes; ++i) sums[i % kNormLanes] += square(i);
  float sum = 0.0f;
  for (int64_t i = of_lanes; i < count; ++i) sum += square(i);
  for (int first = kNormLanes; first < kNormChains; first += kNormLanes) {
    for (int lane = 0; lane < kNormLanes; ++lane) sums[lane] += sums[first + lane];
  }
  for (int lane = 0; lane < kNormLanes; ++lane) sum += sums[lane];
  return sum;
}

// Rounds to the numbers of a type. (A bfloat16 is not narrowed, which would take half of the time.)
XLA_GPU_INLINE Lanes Rounded(Lanes x, float) { return x; }
XLA_GPU_INLINE Lanes Rounded(Lanes x, Half) { return WidenHalf(NarrowToHalf(x)); }
XLA_GPU_INLINE Lanes Rounded(Lanes x, BFloat16) {
  const Words bits = BitCast<Words>(x);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  return x != x ? x : BitCast<Lanes>(rounded);
}

template <bool kRoundsFirst, typename T>
void NormalizeHead(const T* head, const float* weights, int64_t count, float inverse_rms, T* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes x = LoadWide(head + i, count - i) * inverse_rms;
    if constexpr (kRoundsFirst) x = Rounded(x, T());
    StoreNarrow(x * LoadWide(weights + i, count - i), to + i, count - i);
  }
}

template <typename T>
void RotateHalves(const T* head, const float* cos_sin, int64_t num_pairs, T* to) {
  for (int64_t i = 0; i < num_pairs; i += kLanes) {
    const int64_t count = num_pairs - i;
    const Lanes cos = LoadWide(cos_sin + i, count);
    const Lanes sin = LoadWide(cos_sin + num_pairs + i, count);
    const RotaryPair<Lanes> x = {LoadWide(head + i, count), LoadWide(head + num_pairs + i, count)};
    const RotaryPair<Lanes> turned = Rotate(x, cos, sin);
    StoreNarrow(turned.first, to + i, count);
    StoreNarrow(turned.second, to + num_pairs + i, count);
  }
}

template <typename T>
void RotateNeighbours(const T* head, const float* cos_sin, int64_t num_pairs, T* to) {
  for (int64_t i = 0; i < num_pairs; ++i) {
    const Pair x = {ToFloat(head[2 * i]), ToFloat(head[2 * i + 1])};
    const Pair turned = Rotate(x, cos_sin[i], cos_sin[num_pairs + i]);
    FromFloat(turned.first, to + 2 * i);
    FromFloat(turned.second, to + 2 * i + 1);
  }
}

// The butterflies of distances below kLanes, and below the block, of numbers side by side.
template <int kDistance = 1>
XLA_GPU_INLINE Lanes ButterfliesInVector(Lanes x, int64_t block) {
  if constexpr (kDistance < kLanes) {
    if (kDistance >= block) return x;
    const Words bits = BitCast<Words>(x);
    const Lanes other = BitCast<Lanes>(Shuffle<Exchanged<kDistance>>(bits, bits));
    const Mask is_second = (Indices(std::make_integer_sequence<int, kLanes>()) & kDistance) != 0;
    return ButterfliesInVector<2 * kDistance>(is_second ? other - x : x + other, block);
  }
  return x;
}

static_assert(kMostLanes % kLanes == 0);

template <typename T>
void TransformHead(const T* head, const float* signs, int64_t count, float* to) {
  const int64_t block = HadamardBlock(count);
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes x = LoadWide(head + i, count - i);
    if (signs != nullptr) x *= LoadWide(signs + i, count - i);
    Store(ButterfliesInVector(x, block), to + i);
  }
  for (int64_t distance = kLanes; distance < block; distance *= 2) {
    for (int64_t i = 0; i < count; i += kLanes) {
      if ((i & distance) != 0) continue;
      Lanes first = Load<Lanes>(to + i), second = Load<Lanes>(to + i + distance);
      Butterfly(&first, &second);
      Store(first, to + i);
      Store(second, to + i + distance);
    }
  }
  const float scale = HadamardScale(block);
  for (int64_t i = 0; i < count; i += kLanes) Store(Load<Lanes>(to + i) * scale, to + i);
}

float SumOfSquaresOf(DType dtype, const void* numbers, int64_t count) {
  return WithTensorType(dtype, [&](auto type) {
    return SumOfSquares(static_cast<const decltype(type)*>(numbers), count);
  });
}

void Normalize(DType dtype, const void* head, const float* weights, int64_t count,
               float inverse_rms, bool rounds_first, void* to) {
  WithTensorType(dtype, [&](auto type) {
    using T = decltype(type);
    const T* x = static_cast<const T*>(head);
    T* y = static_cast<T*>(to);
    if (rounds_first) {
      NormalizeHead<true>(x, weights, count, inverse_rms, y);
    } else {
      NormalizeHead<false>(x, weights, count, inverse_rms, y);
    }
  });
}

void RotateHead(DType dtype, const void* head, const float* cos_sin, int64_t num_pairs,
                bool is_interleaved, void* to) {
  WithTensorType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto rotate = is_interleaved ? &RotateNeighbours<T> : &RotateHalves<T>;
    rotate(static_cast<const T*>(head), cos_sin, num_pairs, static_cast<T*>(to));
  });
}

void Transform(DType dtype, const void* head, const float* signs, int64_t count, float* to) {
  WithTensorType(dtype, [&](auto type) {
    TransformHead(static_cast<const decltype(type)*>(head), signs, count, to);
  });
}

void NarrowTo(const float* numbers, int64_t count, DType dtype, void* to) {
  WithTensorType(dtype, [&](auto type) {
    auto* narrow = static_cast<decltype(type)*>(to);
    for (int64_t i = 0; i < count; i += kLanes) {
      StoreNarrow(LoadWide(numbers + i, count - i), narrow + i, count - i);
    }
  });
}

}  // namespace

#define XLA_GPU_NAME_OF_KERNEL(instruction_set) kHeadsKernel_##instruction_set
#define XLA_GPU_KERNEL(instruction_set) XLA_GPU_NAME_OF_KERNEL(instruction_set)
#define XLA_GPU_STRING_OF(x) #x
#define XLA_GPU_STRING(x) XLA_GPU_STRING_OF(x)

extern const HeadsKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET);
const HeadsKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET) = {
    XLA_GPU_STRING(XLA_GPU_INSTRUCTION_SET),
    SumOfSquaresOf,
    Normalize,
    RotateHead,
    Transform,
    NarrowTo};

}  // namespace xla_gpu::kv_cache_update
