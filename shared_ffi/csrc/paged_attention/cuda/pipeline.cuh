// A pipeline of stages in shared memory: producers fill a stage, consumers read and free it.
#pragma once

#include "../../gpu/barrier.cuh"

namespace xla_gpu::paged_attention {

// A stage of the pipeline, and the parity of the round through all stages.
template <int kNumStages>
struct PipelineState {
  int index = 0;
  int phase = 0;

  __device__ __forceinline__ PipelineState Next() const {
    return index + 1 == kNumStages ? PipelineState{0, phase ^ 1} : PipelineState{index + 1, phase};
  }

  __device__ __forceinline__ PipelineState Previous() const {
    return index == 0 ? PipelineState{kNumStages - 1, phase ^ 1} : PipelineState{index - 1, phase};
  }

  // The stage after `n` others since the first.
  static __device__ __forceinline__ PipelineState Of(uint32_t n) {
    return {static_cast<int>(n % kNumStages), static_cast<int>(n / kNumStages % 2)};
  }
};

// The barriers of a pipeline. Producers of a stage arrive at `filled`, its consumers at `freed`.
template <int kNumStages>
struct PipelineBarriers {
  gpu::Barrier filled[kNumStages];
  gpu::Barrier freed[kNumStages];

  __device__ void Init(int num_producers, int num_consumers) {
    for (int i = 0; i < kNumStages; ++i) {
      gpu::InitBarrier(&filled[i], num_producers);
      gpu::InitBarrier(&freed[i], num_consumers);
    }
  }
  __device__ __forceinline__ void WaitFreed(PipelineState<kNumStages> stage) {
    gpu::WaitForPhase(&freed[stage.index], stage.phase ^ 1);  // returns at once in the first round
  }
  __device__ __forceinline__ void WaitFilled(PipelineState<kNumStages> stage) {
    gpu::WaitForPhase(&filled[stage.index], stage.phase);
  }
  // Each warp of the consumers calls it.
  __device__ __forceinline__ void Free(PipelineState<kNumStages> stage) {
    __syncwarp();
    FreeTogether(stage);
  }
  // The same behind an instruction that the lanes of the warp execute together.
  __device__ __forceinline__ void FreeTogether(PipelineState<kNumStages> stage) {
    if (threadIdx.x % gpu::kWarpSize == 0) gpu::Arrive(&freed[stage.index]);
  }
};

}  // namespace xla_gpu::paged_attention
