// The kernel that normalizes and transforms, and does all that the others do. A warp takes a head
// at a time: it adds up the squares, and then reads the head again, which is in the processor's
// cache.
#pragma once

#include <algorithm>

#include "hadamard.cuh"
#include "norm.h"
#include "scales.cuh"

namespace xla_gpu::kv_cache_update {

static_assert(kNormChains == gpu::kWarpSize, "a lane has a chain");

// 1 / sqrt(mean of squares + eps) of `count` numbers, number(i), in every lane of a warp.
template <typename Number>
__device__ float InverseRmsOf(const Number& number, int count, float eps) {
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarpSize;
  const int whole = count / kNormChains * kNormChains, of_lanes = count / kNormLanes * kNormLanes;
  const auto square = [&](int i) {
    const float x = number(i);
    return x * x;
  };
  ChainSum<float> chain;
  for (int i = lane; i < whole; i += kNormChains) chain.Add(square(i));
  float sum = chain.Sum();
  if (lane < kNormLanes) {
    for (int i = whole + lane; i < of_lanes; i += kNormLanes) sum += square(i);
  }
  float of_lane = sum;
  for (int other = kNormLanes; other < kNormChains; other += kNormLanes) {
    of_lane += gpu::ShuffleXor(sum, other);
  }
  float total = 0.0f;
  for (int i = of_lanes; i < count; ++i) total += square(i);
  for (int from = 0; from < kNormLanes; ++from) total += gpu::Shuffle(of_lane, from);
  return InverseRms(total, count, eps);
}

template <typename T>
__device__ float RoundedTo(float x) {
  T rounded;
  gpu::FromFloat(x, &rounded);
  return gpu::ToFloat(rounded);
}

// A head of a query or key, as it becomes. Until it is written, every lane may ask for any number.
template <typename T>
class NormalizedHead {
 public:
  // `first_weight`: of the head. `inverse_rms`: of all heads; not used where a head has its own.
  __device__ NormalizedHead(const Params& p, const NormWeight& weight, const T* head, int number,
                            int64_t position, float inverse_rms)
      : p_(p),
        weight_(weight),
        head_(head),
        first_weight_(weight.is_over_heads ? static_cast<int64_t>(number) * p.head_size : 0),
        position_(position),
        inverse_rms_(inverse_rms) {
    if (weight.data == nullptr || weight.is_over_heads) return;
    const auto before_norm = [&](int i) {
      return p.norms.are_after_rotation ? Rotated(i) : Number(i);
    };
    inverse_rms_ = InverseRmsOf(before_norm, static_cast<int>(p.head_size), p.norms.eps);
  }

  // Number i as it becomes.
  __device__ float operator()(int i) const {
    return p_.norms.are_after_rotation ? Normalized(Rotated(i), i) : Rotated(i);
  }

  // Writes the head in place, by a warp: what a pair becomes depends on its two numbers alone.
  __device__ void Write(T* head) const {
    const int lane = static_cast<int>(threadIdx.x) % gpu::kWarpSize;
    const int num_pairs = static_cast<int>(p_.rotary.rotary_dim) / 2;
    for (int pair = lane; pair < num_pairs; pair += gpu::kWarpSize) {
      const int first = FirstOf(pair), second = first + Distance();
      const Pair x = RotatedPair(pair);
      gpu::FromFloat(AtLast(x.first, first), head + first);
      gpu::FromFloat(AtLast(x.second, second), head + second);
    }
    const int head_size = static_cast<int>(p_.head_size);
    for (int i = 2 * num_pairs + lane; i < head_size; i += gpu::kWarpSize) {
      gpu::FromFloat(AtLast(BeforeRotation(i), i), head + i);
    }
  }

 private:
  __device__ float Number(int i) const { return gpu::ToFloat(head_[i]); }

  __device__ float Normalized(float x, int i) const {
    if (weight_.data == nullptr) return x;
    float weight = weight_.dtype == DType::kFloat32
                       ? static_cast<const float*>(weight_.data)[first_weight_ + i]
                       : gpu::ToFloat(static_cast<const T*>(weight_.data)[first_weight_ + i]);
    if (p_.norms.adds_one) weight = 1.0f + weight;
    float scaled = x * inverse_rms_;
    if (p_.norms.rounds_first) scaled = RoundedTo<T>(scaled);
    return RoundedTo<T>(scaled * weight);
  }

  __device__ float BeforeRotation(int i) const {
    return p_.norms.are_after_rotation ? Number(i) : Normalized(Number(i), i);
  }
  __device__ float AtLast(float x, int i) const {
    return p_.norms.are_after_rotation ? Normalized(x, i) : x;
  }

  // The numbers of a pair.
  __device__ int FirstOf(int pair) const { return p_.rotary.is_interleaved ? 2 * pair : pair; }
  __device__ int Distance() const {
    return p_.rotary.is_interleaved ? 1 : static_cast<int>(p_.rotary.rotary_dim) / 2;
  }

  __device__ Pair RotatedPair(int pair) const {
    const int64_t num_pairs = p_.rotary.rotary_dim / 2, row = position_ * p_.rotary.rotary_dim;
    float cos[1], sin[1];
    LoadTable<T>(p_.rotary, row + pair, cos);
    LoadTable<T>(p_.rotary, row + num_pairs + pair, sin);
    const int first = FirstOf(pair);
    const Pair x = {BeforeRotation(first), BeforeRotation(first + Distance())};
    const Pair turned = Rotate(x, cos[0], sin[0]);
    return {RoundedTo<T>(turned.first), RoundedTo<T>(turned.second)};
  }

  __device__ float Rotated(int i) const {
    if (i >= p_.rotary.rotary_dim) return BeforeRotation(i);
    const int pair = p_.rotary.is_interleaved ? i / 2 : i % Distance();
    const Pair x = RotatedPair(pair);
    return FirstOf(pair) == i ? x.first : x.second;
  }

  const Params& p_;
  const NormWeight& weight_;
  const T* const head_;
  const int64_t first_weight_;
  const int64_t position_;
  float inverse_rms_;
};

// 1 / sqrt(mean of squares + eps) of all heads of a token, where they are normalized together.
template <typename T>
__device__ float InverseRmsOfHeads(const Params& p, const NormWeight& weight, const T* heads,
                                   int64_t num_heads) {
  if (!weight.is_over_heads) return 0.0f;
  const auto number = [&](int i) { return gpu::ToFloat(heads[i]); };
  return InverseRmsOf(number, static_cast<int>(num_heads * p.head_size), p.norms.eps);
}

// Writes a row of a cache, by a warp: to the one of T, if the cache has key's dtype.
template <bool kHasGroups, typename T, typename Number>
__device__ void StoreInRow(const Number& number, int count, float divisor, float* made,
                           const ScalesOfGroups& groups, int64_t first, DType dtype, T* unchanged,
                           int8_t* rounded) {
  if (IsQuantized(dtype)) {
    StoreRow<kHasGroups>(number, count, divisor, made, groups, first, dtype, rounded);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % gpu::kWarpSize;
  for (int i = lane; i < count; i += gpu::kWarpSize) gpu::FromFloat(number(i), unchanged + i);
}

// The thread blocks of a token. Where heads are normalized together there is one, so that a query
// is not written before all of it has been added up; otherwise a warp has a head.
inline int64_t BlocksOfToken(const Params& p) {
  if ((!p.norms.AreUsed() && !p.hadamard.IsUsed()) || p.norms.query.is_over_heads) return 1;
  const int64_t num_heads = p.num_heads + p.num_kv_heads * (p.value_head_size == 0 ? 1 : 2);
  const int64_t most = 0x7fffffff / (p.num_tokens + 1);
  return std::max<int64_t>(1, std::min((num_heads + kWarps - 1) / kWarps, most));
}

// Calls store(number) for a head whose numbers are number(i), or for the transformed one.
template <bool kTransforms, typename Number, typename Store>
__device__ void StoreTransformed(const Params& p, bool is_transformed, const Number& number,
                                 int count, const Store& store) {
  if constexpr (kTransforms) {
    if (is_transformed) {
      const float* const row = Transformed(p, number, count);
      return store([row](int i) { return row[i]; });
    }
  }
  store(number);
}

// BlocksOfToken blocks of threads per token, with HadamardBytes of shared memory. `kTransforms`:
// there are Walsh-Hadamard transforms.
template <typename From, bool kTransforms, bool kHasGroups>
__global__ void UpdateNormalized(Params p) {
  const int blocks_of_token = static_cast<int>(gridDim.x / p.num_tokens);
  const int64_t token = blockIdx.x / blocks_of_token, slot = p.Slot(token);
  const bool is_rotated = p.rotary.cos_sin_cache != nullptr;
  const int64_t position = is_rotated ? p.rotary.positions.At(token) : 0;
  const bool has_row = !is_rotated || p.rotary.HasRow(position);
  const int part = static_cast<int>(blockIdx.x % blocks_of_token);
  const int first = part * kWarps + static_cast<int>(threadIdx.x) / gpu::kWarpSize;
  const int step = blocks_of_token * kWarps, lane = static_cast<int>(threadIdx.x) % gpu::kWarpSize;
  const int num_heads = static_cast<int>(p.num_heads), head_size = static_cast<int>(p.head_size);
  const int num_kv_heads = static_cast<int>(p.num_kv_heads);

  From* query = static_cast<From*>(p.query) + token * p.query_stride;
  const float of_queries = InverseRmsOfHeads(p, p.norms.query, query, num_heads);
  if (p.norms.query.is_over_heads) __syncthreads();
  int row = first;
  for (; row < num_heads; row += step) {
    From* head = query + static_cast<int64_t>(row) * head_size;
    if (has_row) {
      const NormalizedHead<From> number(p, p.norms.query, head, row, position, of_queries);
      if constexpr (kTransforms) {
        if (p.hadamard.has_keys) {
          const float* const transformed = Transformed(p, number, head_size);
          for (int i = lane; i < head_size; i += gpu::kWarpSize) {
            gpu::FromFloat(transformed[i], head + i);
          }
          continue;
        }
      }
      number.Write(head);
    } else if (slot >= 0) {
      for (int i = lane; i < head_size; i += gpu::kWarpSize) {
        gpu::FromFloat(__builtin_nanf(""), head + i);
      }
    }
  }

  if (!has_row || slot < 0 || slot >= p.NumSlots()) return;
  const CachePlace place(p, slot);
  const ScalesOfGroups key_groups = place.KeyGroups(), value_groups = place.ValueGroups();
  const From* key = static_cast<const From*>(p.key) + token * p.key_stride;
  const From* value = static_cast<const From*>(p.value) + token * p.value_stride;
  const float of_keys =
      row < num_heads + num_kv_heads ? InverseRmsOfHeads(p, p.norms.key, key, num_kv_heads) : 0.0f;
  for (; row < num_heads + num_kv_heads; row += step) {
    const int head = row - num_heads;
    const NormalizedHead<From> number(p, p.norms.key, key + static_cast<int64_t>(head) * head_size,
                                      head, position, of_keys);
    float* const made = place.MadeKeyScale(head);
    const float divisor = made == nullptr ? place.KeyDivisor(head) : 1.0f;
    const auto store = [&](const auto& stored) {
      StoreInRow<kHasGroups>(stored, head_size, divisor, made, key_groups,
                             place.FirstGroupOf(key_groups, head), p.cache_dtype,
                             place.Key<From>(head), place.Key<int8_t>(head));
    };
    StoreTransformed<kTransforms>(p, p.hadamard.has_keys, number, head_size, store);
  }
  const int value_head_size = static_cast<int>(p.value_head_size);
  for (; value_head_size > 0 && row < num_heads + 2 * num_kv_heads; row += step) {
    const int head = row - num_heads - num_kv_heads;
    const From* const numbers = value + static_cast<int64_t>(head) * value_head_size;
    const auto raw = [&](int i) { return gpu::ToFloat(numbers[i]); };
    const float inverse =
        p.norms.has_values ? InverseRmsOf(raw, value_head_size, p.norms.eps) : 1.0f;
    const auto number = [&](int i) {
      return p.norms.has_values ? RoundedTo<From>(raw(i) * inverse) : raw(i);
    };
    float* const made = place.MadeValueScale(head);
    const float divisor = made == nullptr ? place.ValueDivisor(head) : 1.0f;
    const auto store = [&](const auto& stored) {
      StoreInRow<kHasGroups>(stored, value_head_size, divisor, made, value_groups,
                             place.FirstGroupOf(value_groups, head), p.value_cache_dtype,
                             place.Value<From>(head), place.Value<int8_t>(head));
    };
    StoreTransformed<kTransforms>(p, p.hadamard.has_values, number, value_head_size, store);
  }
}

}  // namespace xla_gpu::kv_cache_update
