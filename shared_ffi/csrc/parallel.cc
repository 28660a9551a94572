#include "parallel.h"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace xla_gpu {
namespace {

// How long to look for the end of an item before sleeping. To be woken takes about as long.
constexpr std::chrono::microseconds kPatience(100);

// Gives the kernel the default floating-point environment, and the caller its own back. XLA's
// threads flush subnormals to zero and torch's do not: without this, the backends would disagree on
// them.
class DefaultFloatEnvironment {
 public:
#ifdef __SSE2__
  // Only that of SSE and AVX: to set that of the x87, too, takes 0.15 us, and kernels do not use
  // it.
  DefaultFloatEnvironment() { _mm_setcsr(_MM_MASK_MASK); }
  ~DefaultFloatEnvironment() { _mm_setcsr(callers_); }

 private:
  const unsigned callers_ = _mm_getcsr();
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&callers_); }

 private:
  std::fenv_t callers_;
#endif
};

// Shared with the other threads, which may start after ParallelFor has returned: such a thread
// finds no item left and never touches `body`.
struct Progress {
  const std::function<void(int64_t)>* body;
  int64_t num_items;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;
  std::exception_ptr error;  // the first of an item, for the calling thread

  // Throws nothing: it runs on threads of others, below which nobody catches.
  void Work() {
    DefaultFloatEnvironment environment;
    int64_t finished = 0;
    try {
      for (int64_t i; (i = next.fetch_add(1)) < num_items; ++finished) (*body)(i);
    } catch (...) {
      // Nobody begins the items that are left: they count as done, and the one that failed, too.
      finished += 1 + std::max<int64_t>(0, num_items - next.exchange(num_items));
      std::lock_guard<std::mutex> lock(mutex);
      if (error == nullptr) error = std::current_exception();
    }
    if (finished > 0 && done.fetch_add(finished) + finished == num_items) {
      std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_one();
    }
  }
};

}  // namespace

void ParallelFor(const Executor& executor, int64_t num_items,
                 const std::function<void(int64_t)>& body) {
  const int64_t num_threads = std::min(executor.num_threads, num_items);
  if (num_threads <= 1) {
    DefaultFloatEnvironment environment;
    for (int64_t i = 0; i < num_items; ++i) body(i);
    return;
  }
  auto progress = std::make_shared<Progress>();
  progress->body = &body;
  progress->num_items = num_items;
  try {
    executor.run(num_threads, [progress] { progress->Work(); });
  } catch (...) {
    // No memory for a task, or no further thread. The call needs neither. It must not end before
    // the threads that it did get.
    progress->Work();
  }
  const auto is_done = [&] { return progress->done.load() == num_items; };
  const auto start = std::chrono::steady_clock::now();
  while (!is_done() && std::chrono::steady_clock::now() - start < kPatience) {
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->all_done.wait(lock, is_done);
  if (progress->error != nullptr) std::rethrow_exception(std::move(progress->error));
}

}  // namespace xla_gpu
