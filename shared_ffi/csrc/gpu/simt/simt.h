// Emulates CUDA kernels on the CPU, for tests without a GPU. Implements the functions of
// shared_ffi/csrc/gpu/device.cuh and the CUDA runtime that launch.cuh calls.
//
// The threads of a block are fibers of one processor thread, and blocks run one after the other. A
// fiber runs until it must wait for others. The next fiber is drawn at random, so a result that
// depends on an order without synchronization changes with the seed. Asynchronous copies land when
// the kernel waits for them, or at a random time before. Shared memory starts as NaN. A kernel
// fails with a message if it deadlocks, accesses memory outside its arrays, breaks an alignment, or
// if the lanes of a warp reach different warp instructions.
//
// The products of a warpgroup (wgmma) are as late as the PTX ISA allows. Each warp computes its 16
// rows when it waits or, at random, when it commits. Until then the accumulators are NaN. Products
// read shared memory as it was at the last async proxy fence of any warp, at the addresses in the
// decoded descriptor.
//
// Seeds come from the environment variable XLA_GPU_SIMT_SEED. A call of the CUDA runtime fails when
// XLA_GPU_SIMT_FAIL names it. XLA_GPU_SIMT_LAUNCHES names a file that gets the number of thread
// blocks and the threads of a block of each launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "storage.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1;
};

inline dim3 threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

namespace simt {

inline constexpr int kWarpSize = 32;

// Ends the kernel with a message.
[[noreturn]] void Fail(const char* message);

// Waits for every thread of the warp, or for a number of threads at one of the block's barriers.
// The last thread calls `act` with the arguments of all threads, in lane order for a warp, followed
// by a null. All threads must name the same operation.
using Action = std::function<void(void* const* handed_in)>;
void MeetWarp(const char* operation, void* hand_in, const Action& act);
void MeetAt(int barrier, int num_threads, const char* operation, void* hand_in, const Action& act);

// Arrives at a barrier for its other threads, and goes on.
void ArriveAt(int barrier, int num_threads);

int NumThreads();  // in the block

// Every thread of a kernel that begins early must call it.
void WaitForKernelsBefore();

char* SharedMemory();
void CheckShared(const void* address, size_t num_bytes);

// The number of a shared memory address, for instructions that take one.
uint32_t SharedAddress(const void* address);

void CopyAsync(void* to, const void* from, bool valid);
void CommitCopies();
void WaitCopies(size_t pending);

void InitBarrier(void* barrier, int count);
void Arrive(void* barrier);
void ArriveAfterCopies(void* barrier);
void WaitForPhase(void* barrier, int parity);

// Makes the threads' writes to shared memory visible to the async proxy. A whole warp calls it, so
// the copy is made once for 32 threads.
void FenceAsyncProxy();

// d = [d +] a * b by a warpgroup, for a of 64x16, b of 16 x num_columns.
struct Product {
  float* d;  // [num_columns / 8][4]
  int num_columns;
  const uint32_t* a;      // [4], or null: in shared memory
  uint64_t a_descriptor;  // K-major
  uint64_t b_descriptor;
  bool b_is_transposed;  // MN-major
  bool accumulates;
  float (*to_float)(uint16_t bits);
};
void FenceProducts();
void StartProduct(const Product& product);
void CommitProducts();
void WaitProducts(size_t pending);

// Exchange of values between lanes: lane l gets the value of lane from(l).
template <typename T, typename From>
T Exchange(const char* operation, T value, From from) {
  struct {
    T in, out;
    int from;
  } mine{value, value, from(static_cast<int>(threadIdx.x) % kWarpSize)};
  using Mine = decltype(mine);
  MeetWarp(operation, &mine, [](void* const* lanes) {
    for (int l = 0; l < kWarpSize; ++l) {
      auto* lane = static_cast<Mine*>(lanes[l]);
      lane->out = static_cast<Mine*>(lanes[lane->from])->in;
    }
  });
  return mine.out;
}

void LoadMatrices(uint32_t (&to)[4], const void* row, bool transposed);

// T: Half or BFloat16.
template <typename T>
void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Fragments {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
  } mine{c, a, {b0, b1}};
  MeetWarp("mma", &mine, [](void* const* lanes) {
    const auto half = [](uint32_t pair, int which) {
      return xla_gpu::ToFloat(T{static_cast<uint16_t>(which ? pair >> 16 : pair)});
    };
    float a[16][16], b[16][8];
    for (int l = 0; l < kWarpSize; ++l) {
      const auto& lane = *static_cast<Fragments*>(lanes[l]);
      const int row = l / 4, column = l % 4 * 2;
      for (int i = 0; i < 2; ++i) {
        a[row][column + i] = half(lane.a[0], i);
        a[row + 8][column + i] = half(lane.a[1], i);
        a[row][column + 8 + i] = half(lane.a[2], i);
        a[row + 8][column + 8 + i] = half(lane.a[3], i);
        b[column + i][row] = half(lane.b[0], i);
        b[column + 8 + i][row] = half(lane.b[1], i);
      }
    }
    for (int l = 0; l < kWarpSize; ++l) {
      const auto& lane = *static_cast<Fragments*>(lanes[l]);
      for (int e = 0; e < 4; ++e) {
        const int row = l / 4 + e / 2 * 8, column = l % 4 * 2 + e % 2;
        for (int k = 0; k < 16; ++k) lane.c[e] += a[row][k] * b[k][column];
      }
    }
  });
}

}  // namespace simt

namespace xla_gpu::gpu {

inline constexpr int kWarpSize = simt::kWarpSize;

inline char* SharedMemory() { return simt::SharedMemory(); }

inline void SyncThreads(int barrier, int num_threads) {
  simt::MeetAt(barrier, num_threads, "barrier", nullptr, [](void* const*) {});
}

inline void ArriveThreads(int barrier, int num_threads) { simt::ArriveAt(barrier, num_threads); }

inline bool AnyInThreads(int barrier, int num_threads, bool predicate) {
  struct {
    bool in, out;
  } mine{predicate, false};
  using Mine = decltype(mine);
  simt::MeetAt(barrier, num_threads, "vote", &mine, [](void* const* threads) {
    bool any = false;
    for (void* const* t = threads; *t != nullptr; ++t) any |= static_cast<Mine*>(*t)->in;
    for (void* const* t = threads; *t != nullptr; ++t) static_cast<Mine*>(*t)->out = any;
  });
  return mine.out;
}

inline void LetNextKernelBegin() {}

inline void WaitForKernelsBefore() { simt::WaitForKernelsBefore(); }

inline int32_t LoadOnce(const int32_t* address) {
  return *static_cast<const volatile int32_t*>(address);
}

inline int32_t AtomicAdd(int32_t* to, int32_t summand) {
  const int32_t before = *to;
  *to += summand;
  return before;
}

inline void SyncBlock() { SyncThreads(0, simt::NumThreads()); }

inline bool AnyInBlock(bool predicate) { return AnyInThreads(0, simt::NumThreads(), predicate); }

inline void SyncWarp() {
  simt::MeetWarp("warp barrier", nullptr, [](void* const*) {});
}

// The number of lanes of the warp for which `predicate` holds.
inline int CountInWarp(bool predicate) {
  struct {
    bool in;
    int out;
  } mine{predicate, 0};
  using Mine = decltype(mine);
  simt::MeetWarp("ballot", &mine, [](void* const* lanes) {
    int count = 0;
    for (int l = 0; l < kWarpSize; ++l) count += static_cast<Mine*>(lanes[l])->in;
    for (int l = 0; l < kWarpSize; ++l) static_cast<Mine*>(lanes[l])->out = count;
  });
  return mine.out;
}

inline bool AnyInWarp(bool predicate) { return CountInWarp(predicate) != 0; }

template <typename T>
T ShuffleXor(T value, int lane_mask) {
  return simt::Exchange("shuffle xor", value, [&](int lane) { return lane ^ lane_mask; });
}

template <typename T>
T ShuffleUp(T value, int delta) {
  return simt::Exchange("shuffle up", value,
                        [&](int lane) { return lane < delta ? lane : lane - delta; });
}

template <typename T>
T Shuffle(T value, int from_lane) {
  return simt::Exchange("shuffle", value, [&](int) { return from_lane; });
}

using ::xla_gpu::FromFloat;
using ::xla_gpu::ToFloat;

inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }

inline float Exp2(float x) { return std::exp2(x); }

inline float Reciprocal(float x) { return 1 / x; }

inline void CopyAsync16(void* to, const void* from, bool valid) {
  simt::CopyAsync(to, from, valid);
}

inline void CommitCopies() { simt::CommitCopies(); }

template <int kPending>
void WaitCopies() {
  simt::WaitCopies(kPending);
}

inline void LoadMatrices(uint32_t (&to)[4], const void* row) {
  simt::LoadMatrices(to, row, /*transposed=*/false);
}

inline void LoadMatricesTransposed(uint32_t (&to)[4], const void* row) {
  simt::LoadMatrices(to, row, /*transposed=*/true);
}

template <typename T>
void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  simt::MultiplyAdd<T>(c, a, b0, b1);
}

template <typename T>
uint32_t Pack(float low, float high, T) {
  T l, h;
  FromFloat(low, &l);
  FromFloat(high, &h);
  return l.bits | static_cast<uint32_t>(h.bits) << 16;
}

template <typename From, typename T>
void Expand(uint32_t bytes, From, uint32_t (&pairs)[2], T) {
  float numbers[4];
  for (int i = 0; i < 4; ++i) {
    numbers[i] = ToFloat(xla_gpu::BitCast<From>(static_cast<uint8_t>(bytes >> 8 * i)));
  }
  for (int i = 0; i < 2; ++i) pairs[i] = Pack(numbers[2 * i], numbers[2 * i + 1], T{});
}

inline uint32_t SwapMiddleBytes(uint32_t bytes) {
  return (bytes & 0xff0000ff) | (bytes & 0xff00) << 8 | (bytes >> 8 & 0xff00);
}

inline uint32_t LargerHalves(uint32_t a, uint32_t b) {
  const uint32_t low = std::max(a & 0xffff, b & 0xffff), high = std::max(a >> 16, b >> 16);
  return low | high << 16;
}

using Barrier = uint64_t;

inline void InitBarrier(Barrier* barrier, int count) { simt::InitBarrier(barrier, count); }

inline void Arrive(Barrier* barrier) { simt::Arrive(barrier); }

inline void ArriveAfterCopies(Barrier* barrier) { simt::ArriveAfterCopies(barrier); }

inline void WaitForPhase(Barrier* barrier, int parity) { simt::WaitForPhase(barrier, parity); }

inline void FenceAsyncProxy() { simt::FenceAsyncProxy(); }

template <int kRegisters>
void GiveRegistersBack() {}

template <int kRegisters>
void TakeRegisters() {}

inline uint32_t SharedAddress(const void* address) { return simt::SharedAddress(address); }

template <int kBlocks>
void FenceProducts(float (&)[kBlocks][4]) {
  simt::FenceProducts();
}

template <typename T, int kSteps>
void KeepRegisters(T (&)[kSteps][4]) {}

inline void CommitProducts() { simt::CommitProducts(); }

template <int kPending, int kBlocks>
void WaitProducts(float (&)[kBlocks][4]) {
  simt::WaitProducts(kPending);
}

template <typename T>
float BitsToFloat(uint16_t bits) {
  return ToFloat(T{bits});
}

template <int kBlocks, typename T>
void StartProduct(float (&d)[kBlocks][4], uint64_t a, uint64_t b, bool accumulates, T) {
  simt::StartProduct({d[0], kBlocks * 8, nullptr, a, b, false, accumulates, BitsToFloat<T>});
}

template <int kBlocks, typename T>
void StartProductTransposed(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b, T) {
  simt::StartProduct({d[0], kBlocks * 8, a, 0, b, true, true, BitsToFloat<T>});
}

}  // namespace xla_gpu::gpu

// The part of the CUDA runtime that launch.cuh calls. The seed chooses the number of
// multiprocessors of the device, and XLA_GPU_SIMT_CAPABILITY its compute capability: 90 for 9.0, or
// if it is not set.

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorLaunchFailure = 719,
  cudaErrorUnknown = 999
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void*;

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

namespace simt {

// The result of a call: an error if XLA_GPU_SIMT_FAIL names the call, or CALL=ERROR with the
// error's number.
cudaError_t OutcomeOf(const char* call);

// Runs a kernel. If it fails, cudaGetErrorString returns the message.
cudaError_t Launch(const std::function<void()>& kernel, const cudaLaunchConfig_t& config);

}  // namespace simt

template <typename Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute, int) {
  return simt::OutcomeOf("cudaFuncSetAttribute");
}

template <typename Function>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, Function*, int, size_t) {
  *num_blocks = 1;
  return simt::OutcomeOf("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const cudaError_t outcome = simt::OutcomeOf("cudaLaunchKernelEx");
  if (outcome != cudaSuccess) return outcome;
  return simt::Launch([&] { kernel(arguments...); }, *config);
}
