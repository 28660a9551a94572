// Time stamps inside a kernel: XLA_GPU_STAMP(Last, kReady, warp == 0). A build with XLA_GPU_STAMPS
// prints them, a line for each thread block: "stamps", then the clock at each moment. In any other
// build the macro is empty.
#pragma once

#ifndef XLA_GPU_STAMPS
#define XLA_GPU_STAMP(function, moment, is_due)
#else
#define XLA_GPU_STAMP(function, moment, is_due) \
  ::xla_gpu::gpu::stamps::function(::xla_gpu::gpu::stamps::moment, is_due)

#include <cstdio>

namespace xla_gpu::gpu::stamps {

enum Moment {
  kStart,      // of the thread block, when the kernels before it have ended
  kReady,      // its shared memory is
  kScheduled,  // the first work item is found
  kCopies,     // the first tile is asked for
  kFirstTile,  // is there
  kLastTile,   // of the last work item is multiplied
  kFinished,   // the last result is written
  kCount,
};

inline constexpr int kBlocks = 1024;
static __device__ volatile long long clocks[kBlocks][kCount];

__device__ inline volatile long long* Mine() { return clocks[blockIdx.x % kBlocks]; }

// One lane of a warp does, where it is due. If a moment comes again, the last counts.
__device__ inline void Last(Moment moment, bool is_due) {
  if (is_due && threadIdx.x % 32 == 0 && blockIdx.x < kBlocks) Mine()[moment] = clock64();
}

__device__ inline void First(Moment moment, bool is_due) {
  Last(moment, is_due && Mine()[moment] == 0);
}

__device__ inline void Begin(Moment moment, bool is_due) {
  if (!is_due || blockIdx.x >= kBlocks) return;
  for (int i = 0; i < kCount; ++i) Mine()[i] = 0;
  Last(moment, true);
}

// When all others have stamped.
__device__ inline void Print(Moment, bool is_due) {
  if (!is_due || blockIdx.x >= kBlocks) return;
  const auto* s = Mine();
  printf("stamps %lld %lld %lld %lld %lld %lld %lld\n", s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
}

}  // namespace xla_gpu::gpu::stamps

#endif
