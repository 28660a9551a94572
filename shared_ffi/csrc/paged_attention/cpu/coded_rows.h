// K or V of 4 bits that become float32 as they are read. A register of AVX-512 holds a float for
// each of the 16 codes, so that this takes less time than to store the floats and to read them.
#pragma once

#include "prefetch.h"
#include "rows.h"

namespace xla_gpu::paged_attention {
namespace {

// Where something of a kv head lies for each position of a KV tile: `offset` bytes from there.
struct RowPlaces {
  const char* const* positions;  // [kMaxTile]
  int64_t offset;
};

#if defined(__AVX512F__)
#define XLA_GPU_READS_CODES

// It gives the numbers that FloatRows::Expand stores.
struct CodedRows {
  using Storage = float;
  using Steps = Prefetcher::Steps;
  struct Row {
    const char* codes;
    const float* factors;
  };
  static constexpr int kAcross = 2;  // vectors that LoadAcross gives: 16 numbers of each row
  static_assert(kRowsPerVector == 2 && kChains == 8);

  RowPlaces places;
  const float* factors;    // [kMaxTile, factors_stride]: of groups of 2^group_shift numbers
  int64_t factors_stride;  // 1 where a row is one group
  int group_shift;
  Lanes numbers;  // what the codes stand for

  XLA_GPU_INLINE Row RowOf(int64_t j) const {
    return {places.positions[j] + places.offset, factors + j * factors_stride};
  }

  XLA_GPU_INLINE void LoadAcross(const Row (&rows)[kRowsPerVector], int64_t d, int64_t /*count*/,
                                 Lanes* to) const {
    const int64_t group = d >> group_shift;
    const Lanes factors = SplatHalves(rows[0].factors[group], rows[1].factors[group]);
#pragma GCC unroll 2
    for (int v = 0; v < kAcross; ++v) {
      const int64_t pair = d / 2 + v * kChains / 2;
      to[v] = LookUpCodes(numbers, Load<uint32_t>(rows[0].codes + pair),
                          Load<uint32_t>(rows[1].codes + pair)) *
              factors;
    }
  }

  XLA_GPU_INLINE void LoadGroup(int64_t /*i*/, int64_t j, int64_t d, int64_t /*count*/,
                                Lanes* to) const {
    const Row row = RowOf(j);
    const char* const pairs = row.codes + d / 2;
    to[0] = LookUpCodes(numbers, Load<uint32_t>(pairs), Load<uint32_t>(pairs + 4)) *
            row.factors[d >> group_shift];
  }
};
#endif

}  // namespace
}  // namespace xla_gpu::paged_attention
