// What a build to measure leaves out or adds: XLA_GPU_LAB of CMakeLists.txt. Without softmax or
// copies its results are wrong. Each is a variant of tools/lease/lab.json, which says before which
// version of the library it leaves.
#pragma once

namespace xla_gpu::gpu {

#ifdef XLA_GPU_NO_COPIES  // they bring zeros, and read nothing
inline constexpr bool kCopies = false;
#else
inline constexpr bool kCopies = true;
#endif

#ifdef XLA_GPU_NO_SOFTMAX  // weights are logits
inline constexpr bool kSoftmax = false;
#else
inline constexpr bool kSoftmax = true;
#endif

// Whether the threads of the Hopper prefill kernel copy K and V, in place of tensor maps.
#ifdef XLA_GPU_COPIES_BY_THREADS
inline constexpr bool kCopiesByThreads = true;
#else
inline constexpr bool kCopiesByThreads = false;
#endif

#ifdef XLA_GPU_ONE_BLOCK  // of the portable prefill kernel on a multiprocessor
inline constexpr int kMoreSharedBytes = 40 * 1024;
#else
inline constexpr int kMoreSharedBytes = 0;
#endif

}  // namespace xla_gpu::gpu
