// GPU instructions of sm_90a: the products of a warpgroup.
#pragma once

#include "barrier.cuh"

namespace xla_gpu::gpu {

// Sets the number of registers per thread of this warpgroup: lower than before, or higher.
template <int kRegisters>
__device__ __forceinline__ void GiveRegistersBack() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Makes writes to shared memory visible to the async proxy, through which a warpgroup's products
// read it: this thread's writes, and the writes and copies of others that this thread has seen.
// Whole warps call it.
__device__ __forceinline__ void FenceAsyncProxy() {
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

// Keeps the compiler from moving accesses to these registers past this point.
template <int kBlocks>
__device__ __forceinline__ void KeepRegisters(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
  }
}
template <int kSteps>
__device__ __forceinline__ void KeepRegisters(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
  }
}

// Called before a group of products, the first of which writes d. Earlier accesses to the registers
// of those products are then complete.
template <int kBlocks>
__device__ __forceinline__ void FenceProducts(float (&d)[kBlocks][4]) {
  KeepRegisters(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// 1, but ptxas does not know that: a grid has one dimension (launch.cuh). The two numbers, 0 and 1,
// are not the same one to ptxas.
template <int kNumber>
__device__ __forceinline__ int32_t One() {
  return kNumber == 0 ? gridDim.y : gridDim.z;
}

// `descriptor` + number, where all lanes have the same descriptor. In uniform registers ptxas takes
// one instruction for a product of 32 bits and a sum of 64 bits, but two or three for a sum with a
// constant. So the number is multiplied by `one`, which is One. With a power of two in its place,
// ptxas shifts. With one product for two sums, it computes the product by itself.
__device__ __forceinline__ uint64_t AddToDescriptor(uint64_t descriptor, int32_t number,
                                                    int32_t one) {
  if (number == 0) return descriptor;
  uint64_t sum;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(sum) : "r"(one), "r"(number), "l"(descriptor));
  return sum;
}

// Puts the products started since the last call into one group.
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the kPending youngest groups are in flight. None of those may use d.
template <int kPending, int kBlocks>
__device__ __forceinline__ void WaitProducts(float (&d)[kBlocks][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  KeepRegisters(d);
}

// Products of a warpgroup. Warp w holds the rows [16 * w, 16 * w + 16). Each block of 8 columns of
// d is laid out as c of MultiplyAdd, and a 64x16 matrix a in registers as a of MultiplyAdd. A
// descriptor (PTX ISA, chapter on wgmma) stands for a matrix in shared memory.
//   StartProduct: d = a * b^T, or d += a * b^T if `accumulates`. a and b are in shared memory, with
//   the 16 elements of a row adjacent (K-major).
//   StartProductTransposed: d += a * b. a is in registers; b is in shared memory, with 64 elements
//   of each of its 16 rows adjacent (MN-major).
#define XLA_GPU_SUMS4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define XLA_GPU_SUMS32(d, i)                                                                      \
  XLA_GPU_SUMS4(d, i), XLA_GPU_SUMS4(d, i + 1), XLA_GPU_SUMS4(d, i + 2), XLA_GPU_SUMS4(d, i + 3), \
      XLA_GPU_SUMS4(d, i + 4), XLA_GPU_SUMS4(d, i + 5), XLA_GPU_SUMS4(d, i + 6),                  \
      XLA_GPU_SUMS4(d, i + 7)
#define XLA_GPU_NAMES32                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define XLA_GPU_NAMES64                                                                          \
  XLA_GPU_NAMES32                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define XLA_GPU_PRODUCT(T, type)                                                                  \
  __device__ __forceinline__ void StartProduct(float(&d)[8][4], uint64_t a, uint64_t b,           \
                                               bool accumulates, T) {                             \
    asm volatile(                                                                                 \
        "{ .reg .pred adds; setp.ne.s32 adds, %34, 0; "                                           \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" XLA_GPU_NAMES32          \
        "}, %32, %33, adds, 1, 1, 0, 0; }"                                                        \
        : XLA_GPU_SUMS32(d, 0)                                                                    \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));                                    \
  }                                                                                               \
  __device__ __forceinline__ void StartProduct(float(&d)[16][4], uint64_t a, uint64_t b,          \
                                               bool accumulates, T) {                             \
    asm volatile(                                                                                 \
        "{ .reg .pred adds; setp.ne.s32 adds, %66, 0; "                                           \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" XLA_GPU_NAMES64         \
        "}, %64, %65, adds, 1, 1, 0, 0; }"                                                        \
        : XLA_GPU_SUMS32(d, 0), XLA_GPU_SUMS32(d, 8)                                              \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));                                    \
  }                                                                                               \
  __device__ __forceinline__ void StartProductTransposed(float(&d)[16][4], const uint32_t(&a)[4], \
                                                         uint64_t b, T) {                         \
    asm volatile(                                                                                 \
        "{ .reg .pred adds; setp.ne.s32 adds, 1, 0; "                                             \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" XLA_GPU_NAMES64         \
        "}, {%64, %65, %66, %67}, %68, adds, 1, 1, 1; }"                                          \
        : XLA_GPU_SUMS32(d, 0), XLA_GPU_SUMS32(d, 8)                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }                                                                                               \
  __device__ __forceinline__ void StartProductTransposed(float(&d)[8][4], const uint32_t(&a)[4],  \
                                                         uint64_t b, T) {                         \
    asm volatile(                                                                                 \
        "{ .reg .pred adds; setp.ne.s32 adds, 1, 0; "                                             \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" XLA_GPU_NAMES32          \
        "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 1; }"                                          \
        : XLA_GPU_SUMS32(d, 0)                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }
XLA_GPU_PRODUCT(Half, "f16")
XLA_GPU_PRODUCT(BFloat16, "bf16")
#undef XLA_GPU_PRODUCT
#undef XLA_GPU_NAMES64
#undef XLA_GPU_NAMES32
#undef XLA_GPU_SUMS32
#undef XLA_GPU_SUMS4

}  // namespace xla_gpu::gpu
