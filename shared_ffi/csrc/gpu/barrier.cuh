// Barriers in shared memory for copies. And how thread blocks meet in global memory.
#pragma once

#include <cuda/atomic>
#include <cuda/ptx>

#include "device.cuh"

namespace xla_gpu::gpu {

// A barrier in shared memory. A phase ends when its count of arrivals is reached. The threads that
// waited then see everything that the arriving threads did before.
using Barrier = uint64_t;

__device__ __forceinline__ uint32_t SharedAddress(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// One thread calls it, before a barrier of the block.
__device__ __forceinline__ void InitBarrier(Barrier* barrier, int count) {
  ::cuda::ptx::mbarrier_init(barrier, count);
}

__device__ __forceinline__ void Arrive(Barrier* barrier) { ::cuda::ptx::mbarrier_arrive(barrier); }

// Makes the barrier count one arrival once all copies that this thread has started are complete.
__device__ __forceinline__ void ArriveAfterCopies(Barrier* barrier) {
  // CCCL 13.0 has a function for it that leaves out the state space, although it gives an address
  // in shared memory.
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// Whether the current phase has the other parity. From sm_90 on it first waits for that for some
// time.
__device__ __forceinline__ bool TryWaitForPhase(Barrier* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  return ::cuda::ptx::mbarrier_try_wait_parity(barrier, parity);
#else
  return ::cuda::ptx::mbarrier_test_wait_parity(barrier, parity);
#endif
}

// Waits while the current phase has this parity. The first phase has parity 0, so a wait for parity
// 1 at a new barrier returns at once.
__device__ __forceinline__ void WaitForPhase(Barrier* barrier, int parity) {
  while (!TryWaitForPhase(barrier, parity)) {
  }
}

// Adds to a number that the thread blocks of a kernel share, and returns what it was. The caller
// then sees what the callers before it had done: they, and the threads that they had met at a
// barrier.
__device__ __forceinline__ int32_t AddInOrder(int32_t* number, int32_t summand) {
  ::cuda::atomic_ref<int32_t, ::cuda::thread_scope_device> shared(*number);
  return shared.fetch_add(summand, ::cuda::memory_order_acq_rel);
}

}  // namespace xla_gpu::gpu
