// How a CPU kernel spreads independent items over the threads that its caller lends it.
// No XLA headers: kernels include this.
#pragma once

#include <cstdint>
#include <functional>

namespace xla_gpu {

// The threads of whoever called the handler: XLA's intra-op pool, or torch's (see
// eager/runtime.cc).
struct Executor {
  int64_t num_threads;  // 0 or 1: run everything on the calling thread
  // Runs `work` on the calling thread, and on up to num_threads - 1 others as they become free,
  // which may be after it has returned.
  std::function<void(int64_t num_threads, const std::function<void()>& work)> run;
};

// Calls body(i) once for every i in [0, num_items), in no particular order, and returns when all
// calls have returned. The calling thread works too, and waits only for items that another thread
// has already begun: a pool whose threads are all busy, or are themselves in here, cannot deadlock.
// If a call throws, on whatever thread, no further one begins, and the first exception is thrown
// here once all have ended.
void ParallelFor(const Executor& executor, int64_t num_items,
                 const std::function<void(int64_t)>& body);

}  // namespace xla_gpu
