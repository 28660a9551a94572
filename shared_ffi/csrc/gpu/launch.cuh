// How the host starts kernels. Nothing here waits for the device.
#pragma once

#include "device.cuh"

#ifndef XLA_GPU_SIMT

#include <algorithm>

namespace xla_gpu::gpu {

// Returns null, or the message of the last error, which it clears.
inline const char* LastError() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline int DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// Whether the device runs code that is compiled for sm_90a.
inline bool IsHopper() {
  return DeviceAttribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         DeviceAttribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

inline int NumMultiprocessors() { return DeviceAttribute(cudaDevAttrMultiProcessorCount); }

// A kernel with the block size and the shared memory it needs.
template <typename... Arguments>
struct Kernel {
  void (*function)(Arguments...);
  int num_threads;
  int shared_bytes = 0;

  // CUDA requires a request for more than 48 KiB of shared memory, once per device. Repeating it is
  // cheap.
  void Prepare() const {
    if (shared_bytes > 48 * 1024) {
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
  }

  // Thread blocks that the whole device can hold at once.
  int MaxResidentBlocks() const {
    Prepare();
    int per_multiprocessor = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, function, num_threads,
                                                  shared_bytes);
    return std::max(1, per_multiprocessor) * NumMultiprocessors();
  }

  // Returns null, or the message of the error.
  const char* Launch(int64_t num_blocks, void* stream, Arguments... arguments) const {
    if (num_blocks == 0) return nullptr;
    Prepare();
    function<<<static_cast<unsigned>(num_blocks), num_threads, shared_bytes,
               static_cast<cudaStream_t>(stream)>>>(arguments...);
    return LastError();
  }
};

}  // namespace xla_gpu::gpu

#endif  // XLA_GPU_SIMT
