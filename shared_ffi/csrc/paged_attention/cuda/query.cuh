// Chunks of 16 bytes of the query, as they are or as float16.
#pragma once

#include "item.cuh"

namespace xla_gpu::paged_attention {

// Calls copy(row, chunk, from, exists) for each chunk of a query tile in shared memory: where it
// comes from, and whether it exists. `thread` is one of kThreads.
template <typename T, typename QueryRows, typename Copy>
__device__ __forceinline__ void ForQueryChunks(const Params& p, const Item& item, int first_row,
                                               int num_rows, int thread, const Copy& copy) {
  for (int i = thread; i < num_rows * QueryRows::kChunks; i += kThreads) {
    const int row = i / QueryRows::kChunks, chunk = i % QueryRows::kChunks;
    const int column = chunk * QueryRows::kChunk;
    const bool exists = first_row + row < item.num_rows && column < p.head_size;
    const int64_t offset = exists ? QueryOffset(p, item, first_row + row) + column : 0;
    copy(row, chunk, static_cast<const T*>(p.query) + offset, exists);
  }
}

// The same for kNumRows rows, with eight lanes for each row: copy(row, chunk, to, from, exists),
// with the place that the chunk has in shared memory, in elements. Each lane finds the place of one
// row of its warp: to find that of each chunk, with a division, would take longer than the copies.
template <int kNumRows, typename T, typename QueryRows, typename Copy>
__device__ __forceinline__ void ForQueryRows(const Params& p, const Item& item, int first_row,
                                             unsigned thread, const Copy& copy) {
  constexpr unsigned kLanes = 8, kRowsOfWarp = gpu::kWarpSize / kLanes, kRows = kThreads / kLanes;
  constexpr int kSteps = kNumRows / kRows;
  static_assert(kNumRows % kRows == 0 && kSteps * kRowsOfWarp <= gpu::kWarpSize);
  static_assert(kRows % 8 == 0 && kLanes % 8 == 0, "the swizzle repeats");
  const unsigned lane = thread % gpu::kWarpSize, warp = thread / gpu::kWarpSize;
  const int own = lane / kRowsOfWarp * kRows + warp * kRowsOfWarp + lane % kRowsOfWarp;
  const int num_rows = item.num_rows - first_row;
  const bool has_own = own < kNumRows && own < num_rows;
  const int64_t own_offset =  // in bytes
      has_own ? QueryOffset(p, item, first_row + own) * static_cast<int64_t>(sizeof(T)) : 0;
  const int to_lane = QueryRows::Offset(thread / kLanes, lane % kLanes);
  const int lane_column = lane % kLanes * QueryRows::kChunk;
  const char* const query =
      reinterpret_cast<const char*>(static_cast<const T*>(p.query) + lane_column);
  [[maybe_unused]] constexpr int kUnrolled = QueryRows::kChunks >= 32 ? 1 : kSteps;  // registers
#pragma unroll kUnrolled
  for (int step = 0; step < kSteps; ++step) {
    const int row = step * kRows + thread / kLanes;
    const auto* const from = reinterpret_cast<const T*>(
        query + gpu::Shuffle(own_offset, step * kRowsOfWarp + lane / kLanes));
#pragma unroll
    for (unsigned first = 0; first < QueryRows::kChunks; first += kLanes) {
      const int chunk = first + lane % kLanes, further = first * QueryRows::kChunk;
      if (QueryRows::kChunks % kLanes != 0 && chunk >= QueryRows::kChunks) continue;
      copy(row, chunk, to_lane + (step * static_cast<int>(kRows) * QueryRows::kStride + further),
           from + further, row < num_rows && lane_column + further < p.head_size);
    }
  }
}

// The offsets in query of a row of a query tile, and of those that are kStep rows further each. A
// row that does not exist has one, too.
template <int kStep>
class QueryRowsApart {
 public:
  __device__ __forceinline__ QueryRowsApart(const Params& p, const Item& item, int row)
      : group_(p.group.number) {
    const uint32_t group = group_, tokens = p.group.Quotient(kStep);
    const auto sequence_row = static_cast<uint32_t>(item.first_row) + row;
    const auto head_size = static_cast<uint32_t>(p.head_size);
    const uint32_t token = p.group.Quotient(sequence_row);
    head_ = sequence_row - token * group;
    heads_ = kStep - tokens * group;
    offset_ = uint64_t{item.first_token + token} * p.query_stride +
              uint64_t{item.kv_head * group + head_} * head_size;
    step_ = uint64_t{tokens} * p.query_stride + heads_ * head_size;
    to_next_token_ = p.query_stride - int64_t{group * head_size};
  }

  __device__ __forceinline__ int64_t Offset() const { return offset_; }

  __device__ __forceinline__ void Next() {
    offset_ += step_;
    head_ += heads_;
    if (head_ < group_) return;
    offset_ += to_next_token_;
    head_ -= group_;
  }

 private:
  const uint32_t group_;
  uint32_t head_;   // of the row, among those of the kv head
  uint32_t heads_;  // in a step, beside whole tokens
  int64_t offset_;
  int64_t step_;
  int64_t to_next_token_;  // from the head behind a token's last
};

// A chunk of 16 bytes of a row: pairs of 16-bit numbers.
struct alignas(16) FourPairs {
  uint32_t pair[4] = {};
};

// The smallest factor of HalvesOf.
inline constexpr float kSmallestFactor = 1.17549435e-38f;  // 2^-126

// A chunk of a query row as float16. The row is divided by a power of two, `factor`, that leaves
// its largest number below 4. The kLanes lanes of the row call it together.
template <int kLanes, typename T>
__device__ __forceinline__ FourPairs HalvesOf(const T* from, bool exists, float* factor) {
  constexpr int kElements = 8;
  static_assert(gpu::kWarpSize % kLanes == 0, "the lanes of a row are in one warp");
  struct alignas(16) Elements {
    T element[kElements] = {};
  };
  const Elements elements = exists ? *reinterpret_cast<const Elements*>(from) : Elements();
  float numbers[kElements], largest = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    numbers[i] = gpu::ToFloat(elements.element[i]);
    largest = fmaxf(largest, fabsf(numbers[i]));
  }
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    largest = fmaxf(largest, gpu::ShuffleXor(largest, mask));
  }
  const uint32_t exponent = min(max(BitCast<uint32_t>(largest) >> 23, 1u), 253u);
  const float inverse = BitCast<float>((254 - exponent) << 23);
  FourPairs pairs;
#pragma unroll
  for (int i = 0; i < kElements / 2; ++i) {
    pairs.pair[i] = gpu::Pack(numbers[2 * i] * inverse, numbers[2 * i + 1] * inverse, Half{});
  }
  *factor = BitCast<float>(exponent << 23);
  return pairs;
}

}  // namespace xla_gpu::paged_attention
