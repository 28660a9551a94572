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

// The same as `count` arrivals.
__device__ __forceinline__ void Arrive(Barrier* barrier, uint32_t count) {
  ::cuda::ptx::mbarrier_arrive(barrier, count);
}

// Arrives once, and lets the phase end only when tensor copies have brought this many bytes, too.
__device__ __forceinline__ void ArriveExpecting(Barrier* barrier, uint32_t num_bytes) {
  ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                         ::cuda::ptx::space_shared, barrier, num_bytes);
}

// Whether the lane is the one of the warp that does what needs one thread. ptxas then knows that it
// is one. All lanes call it.
__device__ __forceinline__ bool IsElected() {
  int is_elected;
  asm volatile(
      "{ .reg .pred is_elected; elect.sync _|is_elected, %1; selp.s32 %0, 1, 0, is_elected; }"
      : "=r"(is_elected)
      : "r"(kAllLanes));
  return is_elected != 0;
}

// Copies the box of a tensor that begins at these elements, from the innermost dimension on, to an
// address in shared memory. One thread calls it. The barrier, at another such address, counts the
// bytes, zeros outside of the tensor among them.
__device__ __forceinline__ void CopyBox(uint32_t to, const void* map, const int32_t (&first)[4],
                                        uint32_t barrier) {
  // CCCL 13.0 has a function for it that takes generic addresses, which are not uniform then.
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(first[0]), "r"(first[1]), "r"(first[2]), "r"(kCopies ? first[3] : -1),
      "r"(barrier)
      : "memory");
}

// Makes barriers that this thread has initialized known to tensor copies. A barrier of the block
// follows.
__device__ __forceinline__ void FenceBarriers() {
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

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
