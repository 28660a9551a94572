// A ring buffer in shared memory between threads that write to its places and threads that read
// them.
#pragma once

#include "../../gpu/barrier.cuh"

namespace xla_gpu::paged_attention {

// A position in a ring buffer of kPlaces places: the place, and the round through the ring.
template <int kPlaces>
struct Turn {
  int place = 0;
  int round = 0;  // parity of the round

  __device__ __forceinline__ Turn Next() const {
    return place + 1 == kPlaces ? Turn{0, round ^ 1} : Turn{place + 1, round};
  }

  // The turn after `n` others since the first.
  static __device__ __forceinline__ Turn Of(uint32_t n) {
    return {static_cast<int>(n % kPlaces), static_cast<int>(n / kPlaces % 2)};
  }
};

// The barriers of a ring buffer. Writers of a place arrive at `filled`, readers at `freed`.
template <int kPlaces>
struct Ring {
  gpu::Barrier filled[kPlaces];
  gpu::Barrier freed[kPlaces];

  __device__ void Init(int num_writers, int num_readers) {
    for (int i = 0; i < kPlaces; ++i) {
      gpu::InitBarrier(&filled[i], num_writers);
      gpu::InitBarrier(&freed[i], num_readers);
    }
  }
  __device__ __forceinline__ void WaitFreed(Turn<kPlaces> turn) {
    gpu::WaitForPhase(&freed[turn.place], turn.round ^ 1);  // returns at once in the first round
  }
  __device__ __forceinline__ void WaitFilled(Turn<kPlaces> turn) {
    gpu::WaitForPhase(&filled[turn.place], turn.round);
  }
  // Each warp of the readers calls it.
  __device__ __forceinline__ void Free(Turn<kPlaces> turn) {
    gpu::SyncWarp();
    if (threadIdx.x % gpu::kWarpSize == 0) gpu::Arrive(&freed[turn.place]);
  }
};

}  // namespace xla_gpu::paged_attention
