// The kernel before the decode kernel, which prepares its shared memory meanwhile.
#pragma once

#include "../item.cuh"
#include "../scratch.h"

namespace xla_gpu::paged_attention::decode {

inline constexpr int kZeroArrivalsSharedBytes = kWarps * sizeof(int32_t);

// How many positions from the first on have the same slots in a sequence and in the one before it.
// All threads of the block call it.
__device__ inline int32_t CommonPositions(const Params& p, int64_t s, int32_t* of_warps) {
  constexpr int kIds = 16;  // of a thread, whose loads are on their way together
  const int32_t* ids = p.block_tables + s * p.max_blocks_per_seq;
  const int32_t* ids_before = ids - p.max_blocks_per_seq;
  if (ids[0] != ids_before[0]) return 0;  // most calls share nothing
  const int64_t in_row = Smaller(p.max_blocks_per_seq, INT32_MAX - kIds * kThreads);
  // Used after the first ids have come, too.
  const int64_t positions =
      Smaller(gpu::LoadOnce(p.context_lens + s - 1), gpu::LoadOnce(p.context_lens + s));
  const auto row_end = static_cast<int32_t>(in_row);
  int32_t same = 0;  // block ids from the first on
#pragma unroll 1
  while (true) {
    const int32_t begin = same + threadIdx.x;
    int32_t differ[kIds];
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const int32_t at = begin + i * kThreads;
      differ[i] = at < row_end ? ids[at] ^ ids_before[at] : 1;
    }
    const int32_t end = same + kIds * kThreads;
    int32_t first = end;  // that differs
#pragma unroll
    for (int i = kIds - 1; i >= 0; --i) first = differ[i] != 0 ? begin + i * kThreads : first;
#pragma unroll
    for (int mask = gpu::kWarpSize / 2; mask > 0; mask /= 2) {
      first = min(first, gpu::ShuffleXor(first, mask));
    }
    __syncthreads();  // everyone has read those before
    if (threadIdx.x % gpu::kWarpSize == 0) of_warps[threadIdx.x / gpu::kWarpSize] = first;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) first = min(first, of_warps[warp]);
    same = first;
    if (same < end || same * p.block_size >= positions) break;
  }
  return static_cast<int32_t>(Larger(0, Smaller(positions, same * p.block_size)));
}

// Sets the decode kernel's counters to 0, and tells it what neighbouring sequences have in common.
__global__ void __launch_bounds__(kThreads) ZeroArrivals(Params p, Scratch scratch, int64_t count) {
  gpu::LetNextKernelBegin();
  gpu::WaitForKernelsBefore();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    scratch.arrivals[i] = 0;
  }
  auto* of_warps = reinterpret_cast<int32_t*>(gpu::SharedMemory());
  for (int64_t s = blockIdx.x; s < p.max_seqs; s += gridDim.x) {
    const int32_t common = s == 0 ? 0 : CommonPositions(p, s, of_warps);
    if (threadIdx.x == 0) scratch.common[s] = common;
  }
}

}  // namespace xla_gpu::paged_attention::decode
