// GPU instructions that C++ cannot express, one function each. Kernels use them only through this
// file. The tests compile the same kernels for the CPU; the emulated GPU, simt/simt.h, then
// replaces this file.
#pragma once

#ifdef XLA_GPU_SIMT
#include "simt/simt.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

#include "../storage.h"

namespace xla_gpu::gpu {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// The thread block's shared memory, as large as the launch requested. Swizzled matrices need the
// alignment.
__device__ __forceinline__ char* SharedMemory() {
  extern __shared__ __align__(1024) char shared_memory[];
  return shared_memory;
}

__device__ __forceinline__ void SyncBlock() { __syncthreads(); }

// Whether `predicate` holds for any thread of the block. Also a barrier.
__device__ __forceinline__ bool AnyInBlock(bool predicate) { return __syncthreads_or(predicate); }

// Named barrier for `num_threads` threads of the block, in whole warps. There are 16; SyncBlock
// uses barrier 0.
__device__ __forceinline__ void SyncThreads(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Whether `predicate` holds for any thread that meets at the barrier. Also a barrier.
__device__ __forceinline__ bool AnyInThreads(int barrier, int num_threads, bool predicate) {
  int any;
  asm volatile(
      "{ .reg .pred mine, any; setp.ne.s32 mine, %3, 0; bar.red.or.pred any, %1, %2, mine; "
      "selp.s32 %0, 1, 0, any; }"
      : "=r"(any)
      : "r"(barrier), "r"(num_threads), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void SyncWarp() { __syncwarp(); }

__device__ __forceinline__ bool AnyInWarp(bool predicate) {
  return __any_sync(kAllLanes, predicate);
}

template <typename T>
__device__ __forceinline__ T ShuffleXor(T value, int lane_mask) {
  return __shfl_xor_sync(kAllLanes, value, lane_mask);
}

// The value of the lane `delta` lanes below, or the lane's own value if there is none.
template <typename T>
__device__ __forceinline__ T ShuffleUp(T value, int delta) {
  return __shfl_up_sync(kAllLanes, value, delta);
}

template <typename T>
__device__ __forceinline__ T Shuffle(T value, int from_lane) {
  return __shfl_sync(kAllLanes, value, from_lane);
}

// a * b + c, rounded once. The compiler fuses nothing by itself (-fmad=false): which products are
// fused decides the bits, and two kernels that share a function must agree on them.
__device__ __forceinline__ float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// 2^x, within 2 units in the last place; 0 for -infinity.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 unit in the last place.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The conversions of storage.h, each as one instruction.
__device__ __forceinline__ float ToFloat(float x) { return x; }

__device__ __forceinline__ float ToFloat(BFloat16 x) { return ::xla_gpu::ToFloat(x); }

__device__ __forceinline__ float ToFloat(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

__device__ __forceinline__ float ToFloat(Float8E4M3 x) { return gpu::ToFloat(AsHalf(x)) * 256.0f; }

__device__ __forceinline__ float ToFloat(Float8E5M2 x) { return gpu::ToFloat(AsHalf(x)); }

__device__ __forceinline__ float ToFloat(int8_t x) { return x; }

__device__ __forceinline__ void FromFloat(float x, float* to) { *to = x; }

__device__ __forceinline__ void FromFloat(float x, BFloat16* to) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
}

__device__ __forceinline__ void FromFloat(float x, Half* to) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
}

template <typename T>
__device__ __forceinline__ void FromFloat(float x, T* to) {
  static_assert(kIs8Bit<T>, "the others have instructions of their own");
  ::xla_gpu::FromFloat(x, to);
}

// Starts an asynchronous copy of 16 bytes from global to shared memory. If not `valid`, it reads
// nothing and writes zeros. Both addresses must be 16-byte aligned.
__device__ __forceinline__ void CopyAsync16(void* to, const void* from, bool valid) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Puts this thread's copies since the last call into one group.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the kPending youngest groups of this thread are in flight. Other threads'
// copies become visible only after a barrier that follows their own wait.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l /
// 8. It receives two elements of each matrix: row l / 4, columns 2 * (l % 4) and 2 * (l % 4) + 1.
__device__ __forceinline__ void LoadMatrices(uint32_t (&to)[4], const void* row) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared)
               : "memory");
}

// LoadMatrices, with each matrix transposed.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&to)[4], const void* row) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared)
               : "memory");
}

// c += a * b, with a of 16x16, b of 16x8 and c of 16x8 elements spread over the warp. With row =
// lane / 4 and column = 2 * (lane % 4), a lane holds
//   a[0]: (row, column) and the next column; a[1]: 8 rows below; a[2]: 8 columns right; a[3]: both
//   b[0]: (k = column, n = row) and the next k; b[1]: 8 k further
//   c[0], c[1]: (row, column) and the next column; c[2], c[3]: 8 rows below
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1, Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1, BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds two floats to 16 bits and packs them, `low` in the lower half.
__device__ __forceinline__ uint32_t Pack(float low, float high, Half) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t Pack(float low, float high, BFloat16) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Widens four 8-bit numbers, the first in the lowest byte, to two pairs of 16-bit numbers. Exact.
__device__ __forceinline__ void Expand(uint32_t bytes, Float8E4M3, uint32_t (&pairs)[2], Half) {
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
      "cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(bytes));
#else
  // The method of AsHalf, for two numbers at a time.
  const uint32_t raised[2] = {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t sign = raised[i] & 0x80008000, magnitude = raised[i] >> 1 & 0x3f803f80;
    const uint32_t is_nan = (magnitude + 0x00800080) & 0x40004000;
    const uint32_t half = sign | magnitude | is_nan | (is_nan - (is_nan >> 4));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(half), "r"(0x5c005c00));  // 256
  }
#endif
}

__device__ __forceinline__ void Expand(uint32_t bytes, Float8E5M2, uint32_t (&pairs)[2], Half) {
  pairs[0] = __byte_perm(bytes, 0, 0x1404);
  pairs[1] = __byte_perm(bytes, 0, 0x3424);
}

// In float16, 0x6400 is 1024, where the unit in the last place is 1.
__device__ __forceinline__ void Expand(uint32_t bytes, int8_t, uint32_t (&pairs)[2], Half) {
  const uint32_t from_zero = bytes ^ 0x80808080;  // plus 128
  const uint32_t raised[2] = {__byte_perm(from_zero, 0x64, 0x4140),
                              __byte_perm(from_zero, 0x64, 0x4342)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(raised[i]), "r"(0x64806480));  // 1152
  }
}

template <typename T>
__device__ __forceinline__ void Expand(uint32_t bytes, T, uint32_t (&pairs)[2], BFloat16) {
  Expand(bytes, T{}, pairs, Half{});
#pragma unroll
  for (uint32_t& pair : pairs) {
    const Half low{static_cast<uint16_t>(pair)}, high{static_cast<uint16_t>(pair >> 16)};
    pair = Pack(gpu::ToFloat(low), gpu::ToFloat(high), BFloat16{});
  }
}

__device__ __forceinline__ uint32_t SwapMiddleBytes(uint32_t bytes) {
  return __byte_perm(bytes, 0, 0x3120);
}

// The rest of this file needs sm_90a: no other GPU has all of these instructions.

// A barrier in shared memory. A phase ends when its count of arrivals is reached. The threads that
// waited then see everything that the arriving threads did before.
using Barrier = uint64_t;

__device__ __forceinline__ uint32_t SharedAddress(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// One thread calls it, before a barrier of the block.
__device__ __forceinline__ void InitBarrier(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void Arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Makes the barrier count one arrival once all copies that this thread has started are complete.
__device__ __forceinline__ void ArriveAfterCopies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// Waits while the current phase has this parity. The first phase has parity 0, so a wait for parity
// 1 at a new barrier returns at once.
__device__ __forceinline__ void WaitForPhase(Barrier* barrier, int parity) {
  asm volatile(
      "{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
      "@!done bra wait; }" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Makes writes to shared memory visible to the async proxy, through which a warpgroup's products
// read it: this thread's writes, and the writes and copies of others that this thread has seen.
// Whole warps call it.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Sets the number of registers per thread of this warpgroup: lower than before, or higher.
template <int kRegisters>
__device__ __forceinline__ void GiveRegistersBack() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
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

#endif  // XLA_GPU_SIMT
