// GPU instructions for which CUDA C++ has no function, and shorter names for functions of whole
// warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "../storage.h"
#include "lab.h"

namespace xla_gpu::gpu {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// The thread block's shared memory, as large as the launch requested. Swizzled matrices need the
// alignment.
__device__ __forceinline__ char* SharedMemory() {
  extern __shared__ __align__(1024) char shared_memory[];
  return shared_memory;
}

// A number that others may change: the compiler must not read it again.
__device__ __forceinline__ int32_t LoadOnce(const int32_t* address) {
  return *static_cast<const volatile int32_t*>(address);
}

// Kernels of a call may overlap, by these rules. A kernel that is launched with
// Kernel::begins_early begins when all thread blocks of the kernel before it have called
// LetNextKernelBegin or have ended.
//
// - Such a kernel calls WaitForKernelsBefore in every warp before it touches global memory. The
//   kernels before it have ended then, and what they wrote is visible. Nothing else makes it so:
//   not that the kernel before has waited for them, nor that it ended long ago.
// - A kernel calls LetNextKernelBegin only where its own call launches the next kernel. The last
//   kernel of a call never does: what follows is somebody else's. XLA's kernels, for one, read
//   through a cache for what nobody writes (ld.global.nc), which their wait does not protect.
//
// The emulated GPU refuses whatever breaks them. Whoever begins early ends after its wait, so the
// end of a kernel is the end of all kernels before it.
__device__ __forceinline__ void LetNextKernelBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void WaitForKernelsBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Named barrier for `num_threads` threads of the block, in whole warps. There are 16;
// __syncthreads uses barrier 0.
__device__ __forceinline__ void SyncThreads(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Arrives at a named barrier without waiting: the threads that wait there need not be waited for.
__device__ __forceinline__ void ArriveThreads(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
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

__device__ __forceinline__ bool AnyInWarp(bool predicate) {
  return __any_sync(kAllLanes, predicate);
}

// A number that all lanes of the warp have, in a uniform register. They execute it together.
__device__ __forceinline__ uint32_t Uniform(uint32_t number) {
  return __reduce_or_sync(kAllLanes, number);
}

// The lanes of the warp for which `predicate` holds, as bits; their number; and the first of some.
__device__ __forceinline__ uint32_t LanesWith(bool predicate) {
  return __ballot_sync(kAllLanes, predicate);
}
__device__ __forceinline__ int CountInWarp(bool predicate) { return __popc(LanesWith(predicate)); }

__device__ __forceinline__ int FirstOf(uint32_t lanes) { return __popc((lanes & (0 - lanes)) - 1); }

template <typename T>
__device__ __forceinline__ T ShuffleXor(T value, int lane_mask) {
  return __shfl_xor_sync(kAllLanes, value, lane_mask);
}

// The value of the lane `delta` lanes below, or the lane's own value if there is none.
template <typename T>
__device__ __forceinline__ T ShuffleUp(T value, int delta) {
  return __shfl_up_sync(kAllLanes, value, delta);
}

// The value of the lane `delta` lanes above, or the lane's own value if there is none.
template <typename T>
__device__ __forceinline__ T ShuffleDown(T value, int delta) {
  return __shfl_down_sync(kAllLanes, value, delta);
}

// With `width`, a power of two: the value of that one among the `width` lanes of the lane itself.
template <typename T>
__device__ __forceinline__ T Shuffle(T value, int from_lane, int width = kWarpSize) {
  return __shfl_sync(kAllLanes, value, from_lane, width);
}

// Keeps the compiler from moving loads and stores past this point.
__device__ __forceinline__ void KeepOrder() { asm volatile("" ::: "memory"); }

// The same number, of which the compiler knows nothing. What is computed from it is computed here,
// not before a loop, from where on it would take registers.
template <typename T>
__device__ __forceinline__ T Opaque(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// a * b + c, rounded once. The compiler fuses nothing by itself (-fmad=false): which products are
// fused decides the bits, and two kernels that share a function must agree on them.
__device__ __forceinline__ float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// a + b and a * b, where subnormal numbers are zeros: as an addition in memory has them.
__device__ __forceinline__ float AddFlushed(float a, float b) {
  float sum;
  asm("add.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ float MultiplyFlushed(float a, float b) {
  float product;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// Adds to numbers in global memory that no other thread touches, as MultiplyFlushed and AddFlushed
// round. Nothing waits for it.
__device__ __forceinline__ void AddInMemory(float* to, float summand) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(summand) : "memory");
}
// The same for four, from 9.0 on.
__device__ __forceinline__ void AddInMemory(float* to, const float (&summands)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(summands[0]),
               "f"(summands[1]), "f"(summands[2]), "f"(summands[3])
               : "memory");
}

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

__device__ __forceinline__ float ToFloat(Half x) { return __half2float(__ushort_as_half(x.bits)); }

__device__ __forceinline__ float ToFloat(Float8E4M3 x) { return gpu::ToFloat(AsHalf(x)) * 256.0f; }

__device__ __forceinline__ float ToFloat(Float8E5M2 x) { return gpu::ToFloat(AsHalf(x)); }

__device__ __forceinline__ float ToFloat(int8_t x) { return x; }

__device__ __forceinline__ float ToFloat(Int4OrInt8 x) { return x.number; }

__device__ __forceinline__ void FromFloat(float x, float* to) { *to = x; }

__device__ __forceinline__ void FromFloat(float x, BFloat16* to) {
  to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

__device__ __forceinline__ void FromFloat(float x, Half* to) {
  to->bits = __half_as_ushort(__float2half_rn(x));
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
               "r"(valid && kCopies ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void CopyAsync4(void* to, const void* from, bool valid) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// What is read once goes from the L2 cache before all else; what has no policy stays as usual.
__device__ __forceinline__ uint64_t PolicyOfStreams() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t NoPolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}

// CopyAsync16 with a policy of the L2 cache for what is read.
__device__ __forceinline__ void CopyAsync16(void* to, const void* from, bool valid,
                                            uint64_t policy) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared),
      "l"(from), "r"(valid && kCopies ? 16 : 0), "l"(policy)
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

// The bits of two packed 16-bit numbers, and __half2 of such bits.
template <typename Pair>
__device__ __forceinline__ uint32_t BitsOf(Pair pair) {
  static_assert(sizeof(Pair) == sizeof(uint32_t), "two numbers of 16 bits");
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ __forceinline__ __half2 AsPair(uint32_t bits, Half) {
  __half2 pair;
  memcpy(&pair, &bits, sizeof(pair));
  return pair;
}
__device__ __forceinline__ __nv_bfloat162 AsPair(uint32_t bits, BFloat16) {
  __nv_bfloat162 pair;
  memcpy(&pair, &bits, sizeof(pair));
  return pair;
}
__device__ __forceinline__ __half2 AsHalves(uint32_t bits) { return AsPair(bits, Half{}); }

// Rounds two floats to 16 bits and packs them, `low` in the lower half.
__device__ __forceinline__ uint32_t Pack(float low, float high, Half) {
  return BitsOf(__floats2half2_rn(low, high));
}

__device__ __forceinline__ uint32_t Pack(float low, float high, BFloat16) {
  return BitsOf(__floats2bfloat162_rn(low, high));
}

// Widens four 8-bit numbers, the first in the lowest byte, to two pairs of 16-bit numbers. Exact.
__device__ __forceinline__ void Expand(uint32_t bytes, Float8E4M3, uint32_t (&pairs)[2], Half) {
#if __CUDA_ARCH__ >= 890
  // cuda_fp8.h has this conversion, too; with it a kernel takes 1% more instructions.
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
    pairs[i] = BitsOf(__hmul2_rn(AsHalves(half), AsHalves(0x5c005c00)));  // 256
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
    pairs[i] = BitsOf(__hsub2_rn(AsHalves(raised[i]), AsHalves(0x64806480)));  // 1152
  }
}

__device__ __forceinline__ void Expand(uint32_t bytes, Int4OrInt8, uint32_t (&pairs)[2], Half) {
  Expand(bytes, int8_t{}, pairs, Half{});
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

// For each of the lower four half bytes of `codes`, byte (code & 7) of a table: zero from code 8 on
// if the bytes are below 128.
__device__ __forceinline__ uint32_t LookUpPositive(const uint32_t (&table)[2], uint32_t codes) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(table[0]), "r"(table[1]), "r"(codes));
  return bytes;
}

// Widens four numbers plus kRaised, each from 0 to 127, to two pairs of 16-bit numbers. Exact: in
// float16 0x6400 is 1024, in bfloat16 0x4300 is 128, and the unit in the last place is 1.
inline constexpr uint32_t kRaised = 16;
template <typename T>
__device__ __forceinline__ void ExpandRaised(uint32_t bytes, uint32_t (&pairs)[2], T type) {
  constexpr uint32_t kUpper = std::is_same_v<T, Half> ? 0x64 : 0x43;
  constexpr uint32_t kZeros = (kUpper << 8 | kRaised) * 0x00010001;
  const uint32_t raised[2] = {__byte_perm(bytes, kUpper, 0x4140),
                              __byte_perm(bytes, kUpper, 0x4342)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs[i] = BitsOf(__hsub2_rn(AsPair(raised[i], type), AsPair(kZeros, type)));
  }
}

// The products of two pairs of 16-bit numbers.
template <typename T>
__device__ __forceinline__ uint32_t MultiplyPairs(uint32_t a, uint32_t b, T type) {
  return BitsOf(__hmul2_rn(AsPair(a, type), AsPair(b, type)));
}

__device__ __forceinline__ uint32_t SwapMiddleBytes(uint32_t bytes) {
  return __byte_perm(bytes, 0, 0x3120);
}

// sums + 0 * numbers, for pairs of 16-bit numbers: NaN where a number is infinite or NaN.
template <typename T>
__device__ __forceinline__ uint32_t AddZeroTimes(uint32_t numbers, uint32_t sums, T type) {
  return BitsOf(__hfma2(AsPair(numbers, type), AsPair(0, type), AsPair(sums, type)));
}

}  // namespace xla_gpu::gpu
