// How a warp of a tensor core kernel writes its rows, if it has all of their positions.
#pragma once

#include "../partial_results.cuh"
#include "../products.cuh"

namespace xla_gpu::paged_attention::portable {

// The shared memory of a warp through which the sums of its rows go, so that a lane writes 16 bytes
// of a row at once: eight rows of each of its two groups of 16 at a time. C: type of the cache.
template <typename C, int kHeadSize>
struct alignas(16) WarpRowsShared {
  // A row, for the lanes that write it. Lane 2 * g + r of four finds that of row r of group g.
  struct alignas(16) Row {
    float weight;
    uint32_t number;  // its lower half; kNoRow if there is no such row
    uint32_t upper;
  };

  // Adjacent rows begin in other banks of shared memory.
  static constexpr int kBanks = 8;
  static constexpr int kStride = kHeadSize % 32 == 0 ? kHeadSize + kBanks : kHeadSize / 8 * 8 | 8;
  static_assert(kStride >= kHeadSize && kStride % 16 == kBanks);

  float sums[2][8][kStride];
  Row rows[gpu::kWarpSize];
};

// Writes the rows of two groups of 16, group_rows rows apart, to the output, or to the scratch if
// the work item is a split. T: type of the output.
template <typename T, typename C, int kHeadSize>
class WarpRows {
  using Shared = WarpRowsShared<C, kHeadSize>;
  static_assert(sizeof(T) == 2);
  static constexpr int kWidth = 8;  // columns that a lane writes at once
  static constexpr int kLanes = kHeadSize <= 64 ? 8 : 16;
  static constexpr int kSteps = 8 / (gpu::kWarpSize / kLanes);
  static_assert(kHeadSize % kWidth == 0 && kHeadSize <= kLanes * kWidth);
  // Lanes that read 32 columns apart would have the same bank without this change of places.
  static constexpr int kTurn = kIs8Bit<C> ? 8 : 4;
  static __device__ __forceinline__ int Turned(int place) {
    return place / 32 % 2 != 0 ? place ^ kTurn : place;
  }

 public:
  // first_row: the warp's first. The warp calls it.
  template <typename Products>
  static __device__ __forceinline__ void Write(const Params& p, const Scratch& scratch,
                                               const Item& item, int first_row, int group_rows,
                                               const RowState (&states)[2][2],
                                               const Products (&products)[2], Shared* shared) {
    const int lane = gpu::Opaque(threadIdx.x) % gpu::kWarpSize;
    FindRows(p, scratch, item, lane, first_row, group_rows, states, shared);
    WriteGroup(p, scratch, item, lane, 0, products[0], shared);
    __syncwarp();  // it has left the sums
    WriteGroup(p, scratch, item, lane, 1, products[1], shared);
  }

 private:
  static __device__ __forceinline__ void FindRows(const Params& p, const Scratch& scratch,
                                                  const Item& item, int lane, int first_row,
                                                  int group_rows, const RowState (&states)[2][2],
                                                  Shared* shared) {
    const RowState state = Softmax::StateOfLane(lane, states);
    const int row = RowOfLane(lane, first_row, group_rows);
    FinishedRow own;
    uint32_t number = kNoRow;
    if (row < item.num_rows) {
      own = FinishedRow(p, scratch, item, row, state);
      number = static_cast<uint32_t>(own.number);
    }
    shared->rows[lane] = {own.weight, number,
                          static_cast<uint32_t>(static_cast<uint64_t>(own.number) >> 32)};
  }

  template <typename Products>
  static __device__ __forceinline__ void WriteGroup(const Params& p, const Scratch& scratch,
                                                    const Item& item, int lane, int g,
                                                    const Products& products, Shared* shared) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        float* const to = &shared->sums[r][lane / 4][Turned(n * 8) ^ lane % 4 * 2];
        const float(&sums)[4] = products.sums[n];
        *reinterpret_cast<float2*>(to) = {sums[2 * r], sums[2 * r + 1]};
      }
    }
    __syncwarp();
    const uint32_t column = lane % kLanes * kWidth;
    if (item.num_splits == 1) {
      WriteColumns(p, g, lane, column, static_cast<T*>(p.output) + column, *shared);
    } else {
      WriteColumns(p, g, lane, column, scratch.partials + column, *shared);
    }
  }

  // Writes the lane's columns of each row of group g, behind those at `to` in row 0.
  template <typename To>
  static __device__ __forceinline__ void WriteColumns(const Params& p, int g, int lane,
                                                      uint32_t column, To* to,
                                                      const Shared& shared) {
    const auto columns = static_cast<uint32_t>(p.value_head_size);
    const uint32_t row_bytes = columns * sizeof(To);
    const uint32_t no_row = column < columns ? kNoRow : 0;  // this number, or a larger one
    // The lane's first columns are four adjacent ones or, with 8 bits, every other one of eight.
    const int place = Turned(kIs8Bit<C> ? column / 16 * 16 + column % 16 / 2 : column);
    const int first_row = lane / kLanes * kSteps;
    const float* first = &shared.sums[0][first_row][place];
    const float* second = &shared.sums[0][first_row][place ^ kTurn];
    const auto* row = &shared.rows[first_row * 4 + 2 * g];
    // For 9.0, ptxas spills a register in the turns for a cache of 16 bits if this is a loop.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    constexpr int kUnrolled = kIs8Bit<C> ? 1 : kSteps;
#else
    constexpr int kUnrolled = 1;
#endif
#pragma unroll kUnrolled
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const typename Shared::Row of_row = row[r];
        const auto a = *reinterpret_cast<const Columns<4>*>(first + r * 8 * Shared::kStride);
        const auto b = *reinterpret_cast<const Columns<4>*>(second + r * 8 * Shared::kStride);
        if (of_row.number >= no_row) continue;
        Columns<4> values[2];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float sum =
              kIs8Bit<C> ? (k % 2 == 0 ? a : b).column[k / 2] : (k < 4 ? a : b).column[k % 4];
          values[k / 4].column[k % 4] = gpu::Fma(of_row.weight, sum, 0.0f);
        }
        if constexpr (sizeof(To) == sizeof(float)) {
          To* const partial = to + (uint64_t{of_row.upper} << 32 | of_row.number) * columns;
          WriteTo(partial, values[0]);
          WriteTo(partial + 4, values[1]);
        } else {
          struct alignas(16) {
            uint32_t pair[kWidth / 2];
          } words;
#pragma unroll
          for (int k = 0; k < kWidth; k += 2) {
            const float* const two = values[k / 4].column + k % 4;
            words.pair[k / 2] = gpu::Pack(two[0], two[1], To{});
          }
          char* const output = reinterpret_cast<char*>(to) + uint64_t{of_row.number} * row_bytes;
          *reinterpret_cast<decltype(words)*>(output) = words;
        }
      }
      first += Shared::kStride;
      second += Shared::kStride;
      row += 4;
    }
  }
};

}  // namespace xla_gpu::paged_attention::portable
