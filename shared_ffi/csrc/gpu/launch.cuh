// How the host starts kernels. Nothing here waits for the device.
//
// What the CUDA runtime says of a device or a kernel never changes: it is asked once for each
// device and kernel and kept. Every error is returned, and an error is not kept. All of it may
// happen while a CUDA graph is captured.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "cuda_build.h"  // CMake writes it
#include "device.cuh"
#include "error.h"

namespace xla_gpu::gpu {

// The error of a call, if it failed. Clears it: the next call of someone else must not see it.
inline Error Check(const char* call, cudaError_t status) {
  if (status == cudaSuccess) return {};
  cudaGetLastError();
  if (status == cudaErrorNoKernelImageForDevice) {
    return {call, "the library has no code for this GPU, only for " XLA_GPU_ARCHITECTURES
                  ". Build it on this machine, or with XLA_GPU_ARCHITECTURES=all"};
  }
  return {call, cudaGetErrorString(status)};
}

// The most thread blocks of a kernel that would otherwise fill the device. With few blocks each has
// many work items, even in the small calls of the tests, which change it.
inline std::atomic<int64_t>& MaxBlocks() {
  static std::atomic<int64_t> limit{std::numeric_limits<int64_t>::max()};
  return limit;
}

struct Device {
  int number;
  int num_multiprocessors;
  int capability;    // 90: 9.0
  int shared_bytes;  // that a thread block can have

  static Error Current(Device* device) {
    static std::mutex mutex;
    static std::map<int, Device> known;
    int number = 0;
    if (Error error = Check("cudaGetDevice", cudaGetDevice(&number))) return error;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(number);
    if (found != known.end()) {
      *device = found->second;
      return {};
    }
    int num_multiprocessors = 0, major = 0, minor = 0, shared_bytes = 0;
    const std::pair<cudaDeviceAttr, int*> attributes[] = {
        {cudaDevAttrMultiProcessorCount, &num_multiprocessors},
        {cudaDevAttrComputeCapabilityMajor, &major},
        {cudaDevAttrComputeCapabilityMinor, &minor},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes}};
    for (const auto& [attribute, value] : attributes) {
      const cudaError_t status = cudaDeviceGetAttribute(value, attribute, number);
      if (Error error = Check("cudaDeviceGetAttribute", status)) return error;
    }
    *device = {number, num_multiprocessors, 10 * major + minor, shared_bytes};
    known.emplace(number, *device);
    return {};
  }
};

// A kernel with the block size and the shared memory it needs.
template <typename... Arguments>
struct Kernel {
  void (*function)(Arguments...);
  int num_threads;
  int shared_bytes = 0;
  bool begins_early = false;  // on sm_90 and later: see LetNextKernelBegin

  // Launches num_blocks thread blocks, in one dimension: see One in sm90.cuh. BlocksFor gives the
  // permission that shared memory above 48 KiB needs. No blocks means that there is nothing to
  // compute.
  Error Launch(int64_t num_blocks, void* stream, Arguments... arguments) const {
    if (num_blocks == 0) return {};
    if (num_blocks > std::numeric_limits<int32_t>::max()) {
      return {"cudaLaunchKernelEx", "the grid would have 2**31 thread blocks or more"};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim.x = static_cast<unsigned>(num_blocks);
    config.blockDim.x = static_cast<unsigned>(num_threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = begins_early ? 1 : 0;
    return Check("cudaLaunchKernelEx", cudaLaunchKernelEx(&config, function, arguments...));
  }

  // As many thread blocks as the device holds at once, and at most num_items and MaxBlocks(). The
  // kernel may then be launched.
  Error BlocksFor(const Device& device, int64_t num_items, int64_t* num_blocks) const {
    int64_t resident = 0;
    if (Error error = ResidentBlocks(device, &resident)) return error;
    *num_blocks = std::min({resident, num_items, MaxBlocks().load()});
    return {};
  }

  // Launches that many.
  Error LaunchResident(const Device& device, int64_t num_items, void* stream,
                       Arguments... arguments) const {
    int64_t num_blocks = 0;
    if (Error error = BlocksFor(device, num_items, &num_blocks)) return error;
    return Launch(num_blocks, stream, arguments...);
  }

 private:
  // Thread blocks that the device holds at once. The first call also grants the kernel its shared
  // memory, which CUDA requires above 48 KiB.
  Error ResidentBlocks(const Device& device, int64_t* num_blocks) const {
    static std::mutex mutex;
    static std::map<std::pair<int, void (*)(Arguments...)>, int64_t> known;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_pair(device.number, function);
    const auto found = known.find(key);
    if (found != known.end()) {
      *num_blocks = found->second;
      return {};
    }
    if (shared_bytes > 48 * 1024) {
      const cudaError_t status =
          cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (Error error = Check("cudaFuncSetAttribute", status)) return error;
    }
    int per_multiprocessor = 0;
    const cudaError_t status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_multiprocessor, function, num_threads, shared_bytes);
    if (Error error = Check("cudaOccupancyMaxActiveBlocksPerMultiprocessor", status)) return error;
    if (per_multiprocessor < 1) {
      return {"cudaOccupancyMaxActiveBlocksPerMultiprocessor",
              "the device cannot hold one thread block of the kernel"};
    }
    *num_blocks = int64_t{per_multiprocessor} * device.num_multiprocessors;
    known.emplace(key, *num_blocks);
    return {};
  }
};

}  // namespace xla_gpu::gpu
