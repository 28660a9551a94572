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

// Weights are 2^(logit - max). The max is the largest logit of the row so far. In a build to
// measure it may stay behind by this much: most turns need no maximum over the lanes of a row, and
// hardly any rescales sums. With normally distributed logits 60% of a warp's turns would. For the
// plain turn of the prefill kernel, bfloat16, heads of 128, a model says 2,048 to 2,187 cycles, in
// place of 2,051 to 2,276, or of 2,168 to 2,430 with rescaling: 3 to 8% less. A weight of up to 2^8
// has the relative error of others when it is rounded.
#ifdef XLA_GPU_STALE_LARGEST
inline constexpr float kStaleBy = 8;
#else
inline constexpr float kStaleBy = 0;
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
