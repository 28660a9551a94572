// Time stamps inside a kernel. A build with XLA_GPU_STAMPS prints them, a line for each thread
// block: "stamps", then the clock at each moment. Any other build has no code for them.
#pragma once

#include <cstdio>

namespace xla_gpu::gpu {

enum class Moment {
  kStart,      // of the thread block, when the kernels before it have ended
  kReady,      // its shared memory is
  kScheduled,  // the first work item is found
  kCopies,     // the first tile is asked for
  kFirstTile,  // is there
  kLastTile,   // of the last work item is multiplied
  kFinished,   // the last result is written
  kCount,
};

#ifdef XLA_GPU_STAMPS

inline constexpr int kStampedBlocks = 1024;
static __device__ volatile long long stamps[kStampedBlocks][static_cast<int>(Moment::kCount)];

// One lane of one warp calls it. If a moment comes again, the first counts, or the last.
__device__ inline void Stamp(Moment moment, bool first_counts = false) {
  if (threadIdx.x % 32 > 0 || blockIdx.x >= kStampedBlocks) return;
  volatile long long& stamp = stamps[blockIdx.x][static_cast<int>(moment)];
  if (!first_counts || stamp == 0) stamp = clock64();
}

__device__ inline void BeginStamps() {
  if (threadIdx.x > 0 || blockIdx.x >= kStampedBlocks) return;
  for (volatile long long& stamp : stamps[blockIdx.x]) stamp = 0;
  Stamp(Moment::kStart);
}

// The first thread calls it, when all others have stamped.
__device__ inline void PrintStamps() {
  if (threadIdx.x > 0 || blockIdx.x >= kStampedBlocks) return;
  const auto& s = stamps[blockIdx.x];
  printf("stamps %lld %lld %lld %lld %lld %lld %lld\n", s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
}

#else

__device__ __forceinline__ void Stamp(Moment, bool = false) {}
__device__ __forceinline__ void BeginStamps() {}
__device__ __forceinline__ void PrintStamps() {}

#endif

}  // namespace xla_gpu::gpu
