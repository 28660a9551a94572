// What a build to measure leaves out or adds: XLA_GPU_LAB of CMakeLists.txt. Without softmax or
// copies its results are wrong.
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

// Whether ZeroArrivals runs before the decode kernel. A build to measure what that costs counts
// from a nonce instead, which the memory has by chance once in 2^20 times. Nor is it safe in a
// captured graph, which has the nonce of each replay: after one in which nobody came last, as the
// lengths changed, the next one counts on.
#ifdef XLA_GPU_ARRIVALS_HAVE_NONCES
inline constexpr bool kZerosArrivals = false;
#else
inline constexpr bool kZerosArrivals = true;
#endif

#ifdef XLA_GPU_ONE_BLOCK  // of the portable prefill kernel on a multiprocessor
inline constexpr int kMoreSharedBytes = 40 * 1024;
#else
inline constexpr int kMoreSharedBytes = 0;
#endif

}  // namespace xla_gpu::gpu
