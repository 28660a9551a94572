#include "simt.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>

namespace simt {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kMaxSharedBytes = 227 * 1024;  // of a block on sm_90; 99 KiB on the smallest GPUs

struct Copy {
  void* to;
  const void* from;
  bool valid;

  void Land() const {
    if (valid) {
      std::memcpy(to, from, 16);
    } else {
      std::memset(to, 0, 16);
    }
  }
};

struct Fiber {
  jmp_buf resume;
  ucontext_t start;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  std::vector<std::vector<Copy>> copies;  // by group, the last still open
};

// Threads that meet, and what those already there have handed in.
struct Meeting {
  const char* operation = nullptr;
  std::vector<void*> handed_in;  // by thread, and a null at the end
  std::vector<int> waiting;
};

// The block that runs.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<int> ready;
  std::vector<Meeting> warps;
  Meeting all;
  int num_threads = 0;
  int num_running = 0;
  int current = 0;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  jmp_buf scheduler;
  sigjmp_buf failed;
  std::mt19937 random;
};

Block g_block;
std::string g_failure;

void Enter() {
  (*g_block.kernel)();
  for (const std::vector<Copy>& group : g_block.fibers[g_block.current].copies) {
    for (const Copy& copy : group) copy.Land();
  }
  --g_block.num_running;
  _longjmp(g_block.scheduler, 1);
}

void Yield() {
  if (_setjmp(g_block.fibers[g_block.current].resume) == 0) _longjmp(g_block.scheduler, 1);
}

void YieldSometimes() {
  if (g_block.random() % 8 != 0) return;
  g_block.ready.push_back(g_block.current);
  Yield();
}

void Meet(Meeting& meeting, size_t size, int place, const char* operation, void* hand_in,
          const Action& act) {
  if (meeting.waiting.empty()) {
    meeting.operation = operation;
    meeting.handed_in.assign(size + 1, nullptr);
  } else if (std::strcmp(meeting.operation, operation) != 0) {
    Fail((std::string("threads meet at different instructions: ") + meeting.operation + " and " +
          operation)
             .c_str());
  }
  meeting.handed_in[place] = hand_in;
  meeting.waiting.push_back(g_block.current);
  if (meeting.waiting.size() == size) {
    act(meeting.handed_in.data());
    g_block.ready.insert(g_block.ready.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
  }
  Yield();
}

void OnSegfault(int, siginfo_t*, void*) {
  g_failure = "access outside the arrays";
  siglongjmp(g_block.failed, 1);
}

// While it lives, a segmentation fault fails the kernel instead of ending the process.
class SegfaultGuard {
 public:
  SegfaultGuard() {
    static char stack[64 * 1024];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof(stack);
    sigaltstack(&alternate, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = OnSegfault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_action_);
    sigaction(SIGBUS, &action, &old_bus_action_);
  }
  ~SegfaultGuard() {
    sigaction(SIGSEGV, &old_action_, nullptr);
    sigaction(SIGBUS, &old_bus_action_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  struct sigaction old_action_, old_bus_action_;
  stack_t old_stack_;
};

void StartFibers(int num_threads) {
  Block& block = g_block;
  if (block.fibers.size() < static_cast<size_t>(num_threads)) block.fibers.resize(num_threads);
  block.ready.clear();
  block.warps.assign(num_threads / kWarpSize, Meeting());
  block.all = Meeting();
  block.num_threads = block.num_running = num_threads;
  for (int t = 0; t < num_threads; ++t) {
    Fiber& fiber = block.fibers[t];
    fiber.copies.assign(1, {});
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, Enter, 0);
    block.ready.push_back(t);
  }
}

void RunBlock(int num_threads) {
  Block& block = g_block;
  StartFibers(num_threads);
  std::vector<bool> started(num_threads, false);
  while (block.num_running > 0) {
    if (block.ready.empty()) Fail("deadlock: threads wait for others that never come");
    std::swap(block.ready[block.random() % block.ready.size()], block.ready.back());
    block.current = block.ready.back();
    block.ready.pop_back();
    threadIdx.x = block.current;
    if (_setjmp(block.scheduler) == 0) {
      if (started[block.current]) _longjmp(block.fibers[block.current].resume, 1);
      started[block.current] = true;
      setcontext(&block.fibers[block.current].start);
    }
  }
}

int Seed() {
  const char* seed = std::getenv("XLA_GPU_SIMT_SEED");
  return seed == nullptr ? 0 : std::atoi(seed);
}

}  // namespace

void Fail(const char* message) {
  g_failure = message;
  siglongjmp(g_block.failed, 1);
}

void MeetWarp(const char* operation, void* hand_in, const Action& act) {
  const int thread = g_block.current;
  Meet(g_block.warps[thread / kWarpSize], kWarpSize, thread % kWarpSize, operation, hand_in, act);
}

void MeetBlock(const char* operation, void* hand_in, const Action& act) {
  Meet(g_block.all, g_block.num_threads, g_block.current, operation, hand_in, act);
}

char* SharedMemory() { return g_block.shared; }

void CheckShared(const void* address, size_t num_bytes) {
  const char* begin = static_cast<const char*>(address);
  if (begin < g_block.shared || begin + num_bytes > g_block.shared + g_block.shared_bytes) {
    Fail("an address is not in shared memory");
  }
  if (reinterpret_cast<uintptr_t>(address) % num_bytes != 0)
    Fail("a shared address is not aligned");
}

void CopyAsync(void* to, const void* from, bool valid) {
  CheckShared(to, 16);
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) Fail("a copied address is not aligned");
  const Copy copy{to, from, valid};
  if (g_block.random() % 4 == 0) {
    copy.Land();
  } else {
    g_block.fibers[g_block.current].copies.back().push_back(copy);
  }
}

void CommitCopies() {
  g_block.fibers[g_block.current].copies.emplace_back();
  YieldSometimes();
}

void WaitCopies(size_t pending) {
  auto& groups = g_block.fibers[g_block.current].copies;
  while (groups.size() - 1 > pending) {
    for (const Copy& copy : groups.front()) copy.Land();
    groups.erase(groups.begin());
  }
  YieldSometimes();
}

void LoadMatrices(uint32_t (&to)[4], const void* row, bool transposed) {
  struct Rows {
    const uint16_t* row;
    uint32_t* to;
    bool transposed;
  } mine{static_cast<const uint16_t*>(row), to, transposed};
  CheckShared(row, 16);
  MeetWarp(transposed ? "ldmatrix.trans" : "ldmatrix", &mine, [](void* const* lanes) {
    const auto row = [&](int r) { return static_cast<Rows*>(lanes[r])->row; };
    for (int m = 0; m < 4; ++m) {
      unsigned banks = 0;
      for (int r = 0; r < 8; ++r) {
        banks |= 1u << reinterpret_cast<uintptr_t>(row(m * 8 + r)) / 16 % 8;
      }
      if (banks != 0xff) Fail("bank conflict: rows of a matrix lie in the same banks");
      for (int l = 0; l < kWarpSize; ++l) {
        auto& lane = *static_cast<Rows*>(lanes[l]);
        const int i = l / 4, j = l % 4 * 2;
        const uint16_t low = lane.transposed ? row(m * 8 + j)[i] : row(m * 8 + i)[j];
        const uint16_t high = lane.transposed ? row(m * 8 + j + 1)[i] : row(m * 8 + i)[j + 1];
        lane.to[m] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  });
}

const char* Launch(const std::function<void()>& kernel, int64_t num_blocks, int num_threads,
                   int shared_bytes) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (num_threads % kWarpSize != 0) return "the block is not made of whole warps";
  if (static_cast<size_t>(shared_bytes) > kMaxSharedBytes) return "too much shared memory";
  const SegfaultGuard guard;
  const size_t page = 4096, size = (shared_bytes + page - 1) / page * page;
  // Shared memory ends where a page that nobody may touch begins.
  char* memory = static_cast<char*>(
      mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(memory + size, page, PROT_NONE);
  g_block.kernel = &kernel;
  g_block.shared_bytes = (shared_bytes + 15) / 16 * 16;
  g_block.shared = memory + size - g_block.shared_bytes;
  g_block.random.seed(Seed());
  gridDim.x = static_cast<unsigned>(num_blocks);
  g_failure.clear();
  if (sigsetjmp(g_block.failed, 1) == 0) {
    std::vector<unsigned> order(num_blocks);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), g_block.random);
    for (const unsigned block : order) {
      blockIdx.x = block;
      std::memset(g_block.shared, 0xff, g_block.shared_bytes);
      RunBlock(num_threads);
    }
  } else {
    g_failure += " (thread " + std::to_string(g_block.current) + " of block " +
                 std::to_string(blockIdx.x) + ")";
  }
  munmap(memory, size + page);
  return g_failure.empty() ? nullptr : g_failure.c_str();
}

int NumMultiprocessors() { return 1 + Seed() % 5; }

}  // namespace simt
