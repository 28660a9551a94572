// The products of a warp on tensor cores: its query rows with the keys, and with the values, of the
// positions of a KV tile in shared memory.
//
// KV tiles of an 8-bit cache are as the cache holds them. A register with four 8-bit numbers
// becomes two registers of 16-bit numbers right before the product.
#pragma once

#include "softmax.cuh"

namespace xla_gpu::paged_attention {

// The layout in shared memory of rows of head_size elements, in chunks of 16 bytes. The chunks of
// one column in eight adjacent rows must lie in different banks. If a row is a multiple of all
// banks, chunks are swizzled; otherwise rows are an odd number of chunks apart. kHeadSize is
// head_size rounded up to a compiled size; the columns past head_size are zero.
template <typename Element, int kHeadSize>
struct SharedRows {
  static constexpr int kChunk = 16 / sizeof(Element);  // elements of a chunk
  static constexpr int kChunks = kHeadSize / kChunk;
  static constexpr bool kIsSwizzled = kChunks % 8 == 0;
  static constexpr int kStride = (kIsSwizzled ? kChunks : kChunks | 1) * kChunk;
  static_assert(kChunks % 2 == 0, "chunks are multiplied in pairs");

  static __device__ __forceinline__ int Offset(int row, int chunk) {
    const int in_pattern = static_cast<unsigned>(row) % 8;  // a remainder with sign takes longer
    return row * kStride + (kIsSwizzled ? chunk ^ in_pattern : chunk) * kChunk;
  }

  // The offset of the chunk that is an even number of chunks behind that at `offset`, one of the
  // first two of a row.
  static __device__ __forceinline__ int Behind(int offset, int chunks) {
    if (!kIsSwizzled) return offset + chunks * kChunk;
    return (offset ^ chunks % 8 * kChunk) + chunks / 8 * 8 * kChunk;
  }

  static __device__ __forceinline__ int ElementOffset(int row, int column) {
    return Offset(row, column / kChunk) + column % kChunk;
  }
};

// The scales of a position of an 8-bit cache.
struct PositionScales {
  float k_scale;
  float v_scale;
};

// Begins to copy them: zeros for a position that does not exist.
__device__ __forceinline__ void CopyScales(const Params& p, const Item& item, int64_t block,
                                           int64_t in_block, bool exists, PositionScales* to) {
  const auto copy = [&](const KvScales& scales, float* scale) {
    if (scales.data == nullptr) {
      *scale = 1;
    } else {
      gpu::CopyAsync4(scale, scales.AddressOf(exists ? block : 0, in_block, item.kv_head), exists);
    }
  };
  copy(p.k_scale, &to->k_scale);
  copy(p.v_scale, &to->v_scale);
}

// What KV tiles of a cache of type C hold of K and of V. Weights times scales need the range of
// bfloat16, and so does their V.
template <typename T, typename C>
using KeyInTile = std::conditional_t<std::is_same_v<C, ScaledCode>, T, C>;
template <typename C>
using ValueInTile = std::conditional_t<std::is_same_v<C, ScaledCode>, BFloat16, C>;

// T: type of the query. C: type of K, or of V, in the tile. kKeys: positions of a warp. QueryRows,
// CacheRows and ValueRows say where the chunks of 16 bytes of a row of the query, K and V lie in
// shared memory. kColumns: of V.
template <typename T, typename C, int kHeadSize, int kKeys, typename QueryRows, typename CacheRows,
          int kColumns = kHeadSize, typename ValueRows = CacheRows>
struct WarpProducts {
  // The type that weights are rounded to. Multiplied by the scales of the positions of an 8-bit
  // cache, they need the range of bfloat16.
  using Weight = std::conditional_t<kIs8Bit<C>, BFloat16, C>;
  static constexpr int kSteps = kIs8Bit<C> ? 2 : 1;  // products for each pair of chunks
  static_assert(kKeys % 16 == 0, "the product over positions takes 16 at a time");

  // Laid out as logits, with columns in place of positions.
  float sums[kColumns / 8][4] = {};

  static __device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }

  // logits = q k^T, for the rows of `query` from first_row on and the positions from the row
  // first_key of `keys` on. Lane l holds the positions 2 * (l % 4) and the next one of each 8, for
  // the rows l / 4 and l / 4 + 8.
  static __device__ __forceinline__ void MultiplyByKeys(const T* query, int first_row,
                                                        const C* keys, int first_key,
                                                        float (&logits)[kKeys / 8][4]) {
    // As often as there are registers for.
    constexpr int kUnrolled = kIs8Bit<C>        ? 4
                              : kHeadSize > 128 ? 2
                              : kKeys == 16     ? CacheRows::kChunks / 2
                                                : 4;
    MultiplyByKeys<kUnrolled>(query, first_row, 0, keys, first_key,
                              *reinterpret_cast<float(*)[1][kKeys / 8][4]>(&logits));
  }

  // The same for kGroups groups of rows, which begin group_rows rows apart: K is read once.
  template <int kUnrolled, int kGroups>
  static __device__ __forceinline__ void MultiplyByKeys(const T* query, int first_row,
                                                        int group_rows, const C* keys,
                                                        int first_key,
                                                        float (&logits)[kGroups][kKeys / 8][4]) {
    const int lane = Lane();
    const int query_row = QueryRows::Offset(first_row + lane % 16, lane / 16);
    const int key_row = CacheRows::Offset(first_key + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll kUnrolled
    for (int chunk = 0; chunk < CacheRows::kChunks; chunk += 2) {
      uint32_t rows[kGroups][kSteps][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          gpu::LoadMatrices(rows[g][step],
                            query + g * group_rows * QueryRows::kStride +
                                QueryRows::Behind(query_row, chunk * kSteps + 2 * step));
        }
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t key[4];  // both chunks of 8 positions, then of the next 8
        gpu::LoadMatrices(key,
                          keys + CacheRows::Behind(key_row, chunk) + n * 16 * CacheRows::kStride);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kIs8Bit<C>) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              uint32_t pairs[2];
              gpu::Expand(key[2 * i + step], C{}, pairs, T{});
#pragma unroll
              for (int g = 0; g < kGroups; ++g) {
                gpu::MultiplyAdd(logits[g][2 * n + i], rows[g][step], pairs[0], pairs[1], T{});
              }
            }
          } else {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
              gpu::MultiplyAdd(logits[g][2 * n + i], rows[g][0], key[2 * i], key[2 * i + 1], T{});
            }
          }
        }
      }
    }
  }

  // Multiplies by the scales of the positions of an 8-bit cache: scales[j].k_scale and v_scale.
  template <typename Scales>
  static __device__ __forceinline__ void ScaleLogits(const Scales* scales,
                                                     float (&logits)[kKeys / 8][4]) {
    Softmax::ForEach<kKeys / 8>([&](int n, int e, int j) { logits[n][e] *= scales[j].k_scale; });
  }

  // A weight of zero stays zero: where a row does not attend, the scale may be NaN.
  template <typename Scales>
  static __device__ __forceinline__ void ScaleWeights(const Scales* scales,
                                                      float (&weights)[kKeys / 8][4]) {
    Softmax::ForEach<kKeys / 8>([&](int n, int e, int j) {
      weights[n][e] = weights[n][e] == 0 ? 0.0f : weights[n][e] * scales[j].v_scale;
    });
  }

  // Weights of 16 positions for each of the products over positions, rounded to 16 bits.
  using PackedWeights = uint32_t[kKeys / 16][4];
  template <typename Weight>
  static __device__ __forceinline__ void PackWeights(const float (&weights)[kKeys / 8][4],
                                                     PackedWeights& packed) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = weights[2 * n + i / 2];
        packed[n][i] = gpu::Pack(from[i % 2 * 2], from[i % 2 * 2 + 1], Weight{});
      }
    }
  }

  // sums += weights * v, with weights rounded to 16 bits, for the positions from the row first_key
  // of `values` on.
  template <typename Weight>
  __device__ __forceinline__ void AddValues(const C* values, int first_key,
                                            const float (&weights)[kKeys / 8][4]) {
    PackedWeights packed[1];
    PackWeights<Weight>(weights, packed[0]);
    AddValues<Weight>(values, first_key, packed, *reinterpret_cast<WarpProducts(*)[1]>(this));
  }

  // The same for several groups of rows: V is read once. Calls before(n) before the n-th 16
  // positions.
  // first_chunk: of V, a multiple of as many chunks as the columns are.
  struct Nothing {
    __device__ void operator()(int) const {}
  };
  template <typename Weight, int kGroups, typename Before = Nothing>
  static __device__ __forceinline__ void AddValues(const C* values, int first_key,
                                                   const PackedWeights (&packed)[kGroups],
                                                   WarpProducts (&groups)[kGroups],
                                                   const Before& before = {}, int first_chunk = 0) {
    const int lane = kGroups == 1 ? Lane() : gpu::Opaque(threadIdx.x) % gpu::kWarpSize;
    const int value_row = ValueRows::Offset(first_key + lane % 16, first_chunk + lane / 16);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      before(n);
#pragma unroll
      for (int chunk = 0; chunk < kColumns / ValueRows::kChunk; chunk += 2) {
        uint32_t value[4];  // two chunks, each of 8 positions and of the next 8
        gpu::LoadMatricesTransposed(
            value, values + ValueRows::Behind(value_row, chunk) + n * 16 * ValueRows::kStride);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kIs8Bit<C>) {
            uint32_t first[2], second[2];  // the even columns, then the odd ones
            gpu::Expand(gpu::SwapMiddleBytes(value[2 * i]), C{}, first, Weight{});
            gpu::Expand(gpu::SwapMiddleBytes(value[2 * i + 1]), C{}, second, Weight{});
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
              for (int g = 0; g < kGroups; ++g) {
                gpu::MultiplyAdd(groups[g].sums[2 * (chunk + i) + odd], packed[g][n], first[odd],
                                 second[odd], Weight{});
              }
            }
          } else {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
              gpu::MultiplyAdd(groups[g].sums[chunk + i], packed[g][n], value[2 * i],
                               value[2 * i + 1], Weight{});
            }
          }
        }
      }
    }
  }

  // The column of element e of group n of the lane's sums. Two adjacent columns of an 8-bit cache
  // are in one register and go to two groups.
  static __device__ __forceinline__ int Column(int n, int e) {
    const int block_column = Lane() % 4 * 2 + e % 2;
    return kIs8Bit<C> ? n / 2 * 16 + block_column * 2 + n % 2 : n * 8 + block_column;
  }

  // The number of V in that column of a row: each word of the row is loaded once for all of them.
  static __device__ __forceinline__ float Number(const C* row, int n, int e) {
    const int first = kIs8Bit<C> ? Column(n / 2 * 2, 0) : Column(n, 0);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(row + first);
    if constexpr (kIs8Bit<C>) {
      uint32_t pairs[2];
      gpu::Expand(word, C{}, pairs, Half{});
      return gpu::ToFloat(Half{static_cast<uint16_t>(pairs[e] >> n % 2 * 16)});
    } else {
      return gpu::ToFloat(C{static_cast<uint16_t>(word >> e * 16)});
    }
  }

  // Stores the lane's sums of its row r, 0 or 1, and the row's state, which the lanes of the row
  // share.
  __device__ __forceinline__ void Store(int r, const RowState& state, RowState* state_to,
                                        float* row_to) const {
    if (Lane() % 4 == 0) *state_to = state;
    if constexpr (kIs8Bit<C>) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {  // see Column
        *reinterpret_cast<float4*>(row_to + Column(n, 0)) = {
            sums[n][2 * r], sums[n + 1][2 * r], sums[n][2 * r + 1], sums[n + 1][2 * r + 1]};
      }
    } else {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        *reinterpret_cast<float2*>(row_to + Column(n, 0)) = {sums[n][2 * r], sums[n][2 * r + 1]};
      }
    }
  }

  // A value of the cache as the sums take it.
  template <typename Scales>
  static __device__ __forceinline__ float Scaled(C value, const Scales& scales) {
    if constexpr (kIs8Bit<C>) return gpu::ToFloat(value) * scales.v_scale;
    return gpu::ToFloat(value);
  }
};

// A lane's register of 8-bit keys holds 4 adjacent columns of 16. The product expects 2 adjacent
// columns and the 2 columns that are 8 further. Any order of columns gives the same product, so the
// query's columns are permuted to match: a chunk of a row is stored in two places.
template <typename T, typename QueryRows>
struct QueryOf8BitKeys {
  struct alignas(8) TwoPairs {
    uint32_t pair[2];
  };

  static __device__ __forceinline__ void Store(T* query, int row, int chunk,
                                               const FourPairs& columns) {
    const uint32_t(&pair)[4] = columns.pair;
    T* to = query + chunk % 2 * 4;
    const int even = QueryRows::Offset(row, chunk / 2 * 2);
    const int odd = QueryRows::Offset(row, chunk / 2 * 2 + 1);
    *reinterpret_cast<TwoPairs*>(to + even) = {pair[0], pair[2]};
    *reinterpret_cast<TwoPairs*>(to + odd) = {pair[1], pair[3]};
  }
};

// Copies the first kRows query rows of a work item to shared memory, as the products with a cache
// of type C take them. 16-bit caches: the rows have arrived after WaitCopies.
template <int kRows, typename C, typename QueryRows, typename T>
__device__ __forceinline__ void CopyQueryRows(const Params& p, const Item& item, unsigned thread,
                                              T* query) {
  ForQueryRows<kRows, T, QueryRows>(
      p, item, 0, thread, [&](int row, int chunk, int to, const T* from, bool exists) {
        if constexpr (kIs8Bit<C>) {
          QueryOf8BitKeys<T, QueryRows>::Store(
              query, row, chunk, exists ? *reinterpret_cast<const FourPairs*>(from) : FourPairs());
        } else {
          gpu::CopyAsync16(query + to, from, exists);
        }
      });
}

}  // namespace xla_gpu::paged_attention
