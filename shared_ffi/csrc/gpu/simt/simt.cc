#include "simt.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>

namespace simt {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kMaxSharedBytes = 227 * 1024;  // per block on sm_90; 99 KiB on the smallest GPUs
constexpr uint32_t kSharedBegin = 1024;         // the system reserves the memory before it
constexpr int kBarriers = 16;
constexpr int kWarpsPerGroup = 4;
constexpr int kDepth = 16;  // K of a product

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
  bool has_waited;                        // for the kernels before
};

// Copies of a thread, and the barrier where the thread arrives after they have landed.
struct Arrival {
  int thread;
  std::vector<Copy> copies;
  void* barrier;
};

// The contents of a barrier in shared memory.
struct PhaseBarrier {
  int16_t count;    // arrivals of a phase; shared memory starts with less than 0
  int16_t pending;  // arrivals still missing
  int32_t phase;

  static PhaseBarrier* At(void* address) {
    CheckShared(address, sizeof(PhaseBarrier));
    auto* barrier = static_cast<PhaseBarrier*>(address);
    if (barrier->count <= 0) Fail("a barrier in shared memory is not initialized");
    return barrier;
  }
};

// A warp's part of a product, and the arguments of each lane.
struct StartedProduct {
  std::array<Product, kWarpSize> lanes;
  std::array<std::array<uint32_t, 4>, kWarpSize> a;
};

struct ProductGroup {
  std::vector<StartedProduct> products;
  bool is_computed = false;
};

using Sums = std::array<std::vector<float>, kWarpSize>;

struct WarpProducts {
  bool is_fenced = false;
  size_t num_started = 0;
  std::vector<ProductGroup> groups;  // the last still open
  std::map<float*, Sums> sums;       // of products under way, by where the first lane's go
};

// The arguments that all warps of a warpgroup must give alike.
struct ProductOfGroup {
  uint64_t a_descriptor, b_descriptor;
  int num_columns;
  bool has_a, b_is_transposed, accumulates;

  explicit ProductOfGroup(const Product& p)
      : a_descriptor(p.a_descriptor),
        b_descriptor(p.b_descriptor),
        num_columns(p.num_columns),
        has_a(p.a != nullptr),
        b_is_transposed(p.b_is_transposed),
        accumulates(p.accumulates) {}

  bool operator!=(const ProductOfGroup& other) const {
    return a_descriptor != other.a_descriptor || b_descriptor != other.b_descriptor ||
           num_columns != other.num_columns || has_a != other.has_a ||
           b_is_transposed != other.b_is_transposed || accumulates != other.accumulates;
  }
};

// A meeting of threads, and the arguments of those that have arrived.
struct Meeting {
  const char* operation = nullptr;
  std::vector<void*> handed_in;  // by thread, and a null at the end
  std::vector<int> waiting;
  size_t passed = 0;  // threads that have arrived and gone on

  size_t NumArrived() const { return waiting.size() + passed; }
};

// The running block.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<int> ready;
  std::vector<Meeting> warps;
  std::array<Meeting, kBarriers> barriers;
  std::array<int, kBarriers> barrier_threads;
  std::map<void*, std::vector<int>> waiting;  // for a barrier's phase to end
  std::vector<Arrival> arrivals;              // in the order in which each thread asked for them
  std::vector<WarpProducts> products;
  std::vector<std::vector<ProductOfGroup>> products_of_groups;
  std::vector<char> async_view;  // shared memory as the async proxy reads it
  int num_threads = 0;
  int num_running = 0;
  int current = 0;
  char* shared = nullptr;
  size_t shared_bytes = 0;
  bool begins_early = false;
  const std::function<void()>* kernel = nullptr;
  jmp_buf scheduler;
  sigjmp_buf failed;
  std::mt19937 random;
};

Block g_block;
std::string g_failure;

void Enter() {
  (*g_block.kernel)();
  if (g_block.begins_early && !g_block.fibers[g_block.current].has_waited) {
    Fail("a kernel that begins early has not waited for the kernels before it");
  }
  for (const std::vector<Copy>& group : g_block.fibers[g_block.current].copies) {
    for (const Copy& copy : group) copy.Land();
  }
  --g_block.num_running;
  _longjmp(g_block.scheduler, 1);
}

void ArriveAt(void* address) {
  PhaseBarrier* barrier = PhaseBarrier::At(address);
  if (--barrier->pending > 0) return;
  barrier->pending = barrier->count;
  ++barrier->phase;
  std::vector<int>& waiting = g_block.waiting[address];
  g_block.ready.insert(g_block.ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

// The copies of a thread land in order.
void LandArrival(size_t i) {
  std::vector<Arrival>& arrivals = g_block.arrivals;
  const int thread = arrivals[i].thread;
  const auto first = std::find_if(arrivals.begin(), arrivals.end(),
                                  [&](const Arrival& a) { return a.thread == thread; });
  const Arrival arrival = std::move(*first);
  arrivals.erase(first);
  for (const Copy& copy : arrival.copies) copy.Land();
  ArriveAt(arrival.barrier);
}

void LandArrivalsOf(int thread) {
  for (size_t i = 0; i < g_block.arrivals.size();) {
    if (g_block.arrivals[i].thread == thread) {
      LandArrival(i);
    } else {
      ++i;
    }
  }
}

void Yield() {
  if (_setjmp(g_block.fibers[g_block.current].resume) == 0) _longjmp(g_block.scheduler, 1);
}

void YieldSometimes() {
  if (g_block.random() % 8 != 0) return;
  g_block.ready.push_back(g_block.current);
  Yield();
}

void EndIfComplete(Meeting& meeting, size_t size, const Action& act) {
  if (meeting.NumArrived() < size) return;
  if (meeting.waiting.empty()) Fail("threads have arrived at a barrier where none waits");
  act(meeting.handed_in.data());
  g_block.ready.insert(g_block.ready.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
  meeting.passed = 0;
}

void Meet(Meeting& meeting, size_t size, int place, const char* operation, void* hand_in,
          const Action& act) {
  if (meeting.NumArrived() == 0) {
    meeting.operation = operation;
    meeting.handed_in.assign(size + 1, nullptr);
  } else if (std::strcmp(meeting.operation, operation) != 0) {
    Fail((std::string("threads meet at different instructions: ") + meeting.operation + " and " +
          operation)
             .c_str());
  }
  meeting.handed_in[place] = hand_in;
  meeting.waiting.push_back(g_block.current);
  EndIfComplete(meeting, size, act);
  Yield();
}

void OnSegfault(int, siginfo_t*, void*) {
  g_failure = "access outside the arrays";
  siglongjmp(g_block.failed, 1);
}

// During its lifetime a segmentation fault fails the kernel instead of ending the process.
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
  block.barriers.fill(Meeting());
  block.waiting.clear();
  block.arrivals.clear();
  block.products.assign(num_threads / kWarpSize, WarpProducts());
  for (WarpProducts& warp : block.products) warp.groups.emplace_back();
  block.products_of_groups.assign((num_threads / kWarpSize + 3) / kWarpsPerGroup, {});
  block.async_view.assign(block.shared_bytes, '\xff');
  block.num_threads = block.num_running = num_threads;
  for (int t = 0; t < num_threads; ++t) {
    Fiber& fiber = block.fibers[t];
    fiber.copies.assign(1, {});
    fiber.has_waited = false;
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
  // Delays one warp, or none: it runs almost only when the others wait for it.
  const int slow_warp = static_cast<int>(block.random() % (num_threads / kWarpSize + 1));
  const unsigned patience = std::array<unsigned, 3>{4, 64, 0}[block.random() % 3];
  std::vector<bool> started(num_threads, false);
  while (block.num_running > 0) {
    // Copies that end in an arrival land without a wait: early, late, or when every thread waits.
    while (!block.arrivals.empty() &&
           (block.ready.empty() || (patience != 0 && block.random() % patience == 0))) {
      LandArrival(block.random() % block.arrivals.size());
    }
    if (block.ready.empty()) Fail("deadlock: threads wait for others that never come");
    size_t next = block.random() % block.ready.size();
    for (int i = 0; i < 8 && block.ready[next] / kWarpSize == slow_warp; ++i) {
      next = block.random() % block.ready.size();
    }
    std::swap(block.ready[next], block.ready.back());
    block.current = block.ready.back();
    block.ready.pop_back();
    threadIdx.x = block.current;
    if (_setjmp(block.scheduler) == 0) {
      if (started[block.current]) _longjmp(block.fibers[block.current].resume, 1);
      started[block.current] = true;
      setcontext(&block.fibers[block.current].start);
    }
  }
  for (const Meeting& meeting : block.barriers) {
    if (meeting.passed > 0) Fail("threads have arrived at a barrier where none waits");
  }
  for (size_t w = 0; w < block.products.size(); ++w) {
    const WarpProducts& warp = block.products[w];
    if (warp.num_started != block.products_of_groups[w / kWarpsPerGroup].size()) {
      Fail("a product was not started by all warps of a warpgroup");
    }
    if (warp.groups.size() > 1 || !warp.groups[0].products.empty())
      Fail("a product was not waited for");
  }
}

int NumberFrom(const char* variable, int otherwise) {
  const char* number = std::getenv(variable);
  return number == nullptr ? otherwise : std::atoi(number);
}

int Seed() { return NumberFrom("XLA_GPU_SIMT_SEED", 0); }

int Capability() { return NumberFrom("XLA_GPU_SIMT_CAPABILITY", 90); }

}  // namespace

void Fail(const char* message) {
  g_failure = message;
  siglongjmp(g_block.failed, 1);
}

void MeetWarp(const char* operation, void* hand_in, const Action& act) {
  const int thread = g_block.current;
  Meet(g_block.warps[thread / kWarpSize], kWarpSize, thread % kWarpSize, operation, hand_in, act);
}

namespace {

Meeting& MeetingAt(int barrier, int num_threads) {
  if (barrier < 0 || barrier >= kBarriers) Fail("no such barrier");
  if (num_threads <= 0 || num_threads % kWarpSize != 0) Fail("a barrier takes whole warps");
  Meeting& meeting = g_block.barriers[barrier];
  if (meeting.NumArrived() == 0) g_block.barrier_threads[barrier] = num_threads;
  if (g_block.barrier_threads[barrier] != num_threads) {
    Fail("threads disagree on how many of them meet at a barrier");
  }
  return meeting;
}

}  // namespace

void MeetAt(int barrier, int num_threads, const char* operation, void* hand_in, const Action& act) {
  Meeting& meeting = MeetingAt(barrier, num_threads);
  Meet(meeting, num_threads, static_cast<int>(meeting.waiting.size()), operation, hand_in, act);
}

void ArriveAt(int barrier, int num_threads) {
  Meeting& meeting = MeetingAt(barrier, num_threads);
  if (meeting.NumArrived() == 0) {
    meeting.operation = "barrier";
    meeting.handed_in.assign(num_threads + 1, nullptr);
  }
  ++meeting.passed;
  EndIfComplete(meeting, num_threads, [](void* const*) {});
  YieldSometimes();
}

int NumThreads() { return g_block.num_threads; }

void WaitForKernelsBefore() { g_block.fibers[g_block.current].has_waited = true; }

uint32_t SharedAddress(const void* address) {
  CheckShared(address, 1);
  return kSharedBegin + static_cast<uint32_t>(static_cast<const char*>(address) - g_block.shared);
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
  LandArrivalsOf(g_block.current);
  auto& groups = g_block.fibers[g_block.current].copies;
  while (groups.size() - 1 > pending) {
    for (const Copy& copy : groups.front()) copy.Land();
    groups.erase(groups.begin());
  }
  YieldSometimes();
}

void InitBarrier(void* address, int count) {
  CheckShared(address, sizeof(PhaseBarrier));
  const auto arrivals = static_cast<int16_t>(count);
  *static_cast<PhaseBarrier*>(address) = {arrivals, arrivals, 0};
}

void Arrive(void* barrier) {
  ArriveAt(barrier);
  YieldSometimes();
}

void ArriveAfterCopies(void* barrier) {
  PhaseBarrier::At(barrier);
  std::vector<Copy> copies;
  for (std::vector<Copy>& group : g_block.fibers[g_block.current].copies) {
    copies.insert(copies.end(), group.begin(), group.end());
    group.clear();
  }
  g_block.arrivals.push_back({g_block.current, std::move(copies), barrier});
  YieldSometimes();
}

void WaitForPhase(void* address, int parity) {
  while ((PhaseBarrier::At(address)->phase & 1) == parity) {
    g_block.waiting[address].push_back(g_block.current);
    Yield();
  }
  YieldSometimes();
}

void FenceAsyncProxy() {
  MeetWarp("fence.proxy.async", nullptr, [](void* const*) {
    std::memcpy(g_block.async_view.data(), g_block.shared, g_block.shared_bytes);
  });
}

namespace {

constexpr uint32_t kUnderWay = 0x7fbadbad;  // a NaN

WarpProducts& ProductsOfWarp() { return g_block.products[g_block.current / kWarpSize]; }

// A matrix of 16-bit elements in shared memory, as "Matrix Descriptor Format" and "Strides" of
// wgmma in the PTX ISA define it. `major` is the index in the contiguous dimension: K in a K-major
// matrix, otherwise M or N.
class SharedMatrix {
 public:
  SharedMatrix(uint64_t descriptor, bool is_k_major) : is_k_major_(is_k_major) {
    constexpr uint64_t kReserved = 0x3ff1c000c000c000;
    if ((descriptor & kReserved) != 0) Fail("reserved bits of a matrix descriptor are set");
    start_ = Field(descriptor, 0);
    leading_ = Field(descriptor, 16);
    stride_ = Field(descriptor, 32);
    const int mode = static_cast<int>(descriptor >> 62);
    width_ = mode == 0 ? 16 : 256 >> mode;
    if (mode == 0) Fail("matrices without a swizzle are not emulated");
    if ((descriptor >> 49 & 7) != 0) Fail("a matrix's base offset is not emulated");
  }

  uint16_t At(uint32_t major, uint32_t minor) const {
    const uint32_t chunk = major / 8, chunks = width_ / 16;
    uint32_t address = start_ + minor / 8 * stride_ + minor % 8 * width_ + chunk % chunks * 16;
    if (is_k_major_) {  // all of K within the swizzle's width
      if (chunk >= chunks) Fail("a K-major matrix is wider than its swizzle");
    } else {
      address += chunk / chunks * leading_;
    }
    // The swizzle of 128 bytes: bits 4 to 6 ^= bits 7 to 9. Narrower swizzles use fewer bits.
    address ^= address >> 3 & (width_ - 16);
    address += major % 8 * 2;
    if (address < kSharedBegin || address + 2 > kSharedBegin + g_block.shared_bytes) {
      Fail("a matrix is not in shared memory");
    }
    uint16_t bits;
    std::memcpy(&bits, g_block.async_view.data() + (address - kSharedBegin), 2);
    return bits;
  }

 private:
  static uint32_t Field(uint64_t descriptor, int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
  }

  bool is_k_major_;
  uint32_t start_, leading_, stride_, width_;
};

// sums = [sums +] a * b for the warp's 16 rows, in the lanes' register layout.
void Compute(int warp, const StartedProduct& started, Sums* sums) {
  const Product& product = started.lanes[0];
  float a[kDepth][kDepth];
  if (product.a == nullptr) {
    const SharedMatrix matrix(product.a_descriptor, /*is_k_major=*/true);
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < kDepth; ++k) {
        a[row][k] = product.to_float(matrix.At(k, warp % kWarpsPerGroup * 16 + row));
      }
    }
  } else {
    for (int l = 0; l < kWarpSize; ++l) {
      for (int i = 0; i < 8; ++i) {  // halves of registers
        const uint32_t bits = started.lanes[l].a[i / 2];
        if (bits != started.a[l][i / 2]) Fail("a product's registers were written under way");
        const int row = l / 4 + i / 2 % 2 * 8, k = l % 4 * 2 + i % 2 + i / 4 * 8;
        a[row][k] = product.to_float(static_cast<uint16_t>(i % 2 ? bits >> 16 : bits));
      }
    }
  }
  const SharedMatrix matrix(product.b_descriptor, !product.b_is_transposed);
  std::vector<float> b(kDepth * product.num_columns);
  for (int k = 0; k < kDepth; ++k) {
    for (int n = 0; n < product.num_columns; ++n) {
      b[k * product.num_columns + n] =
          product.to_float(product.b_is_transposed ? matrix.At(n, k) : matrix.At(k, n));
    }
  }
  std::vector<float> row_sums(product.num_columns);
  for (int row = 0; row < 16; ++row) {
    const auto sum_of = [&](int n) -> float& {
      return (*sums)[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2];
    };
    for (int n = 0; n < product.num_columns; ++n) row_sums[n] = product.accumulates ? sum_of(n) : 0;
    for (int k = 0; k < kDepth; ++k) {
      const float* b_row = b.data() + k * product.num_columns;
      for (int n = 0; n < product.num_columns; ++n) row_sums[n] += a[row][k] * b_row[n];
    }
    for (int n = 0; n < product.num_columns; ++n) sum_of(n) = row_sums[n];
  }
}

// Computes the remaining products of a warp's first `num_groups` groups. The sums stay under way.
void ComputeGroups(int warp, size_t num_groups) {
  WarpProducts& products = g_block.products[warp];
  for (size_t g = 0; g < num_groups; ++g) {
    ProductGroup& group = products.groups[g];
    for (const StartedProduct& started : group.products) {
      if (!group.is_computed) Compute(warp, started, &products.sums.at(started.lanes[0].d));
    }
    group.is_computed = true;
  }
}

}  // namespace

void FenceProducts() {
  MeetWarp("wgmma.fence", nullptr, [](void* const*) { ProductsOfWarp().is_fenced = true; });
}

void StartProduct(const Product& product) {
  Product mine = product;
  MeetWarp("wgmma.mma_async", &mine, [](void* const* handed_in) {
    const int warp = g_block.current / kWarpSize;
    WarpProducts& products = ProductsOfWarp();
    if (!products.is_fenced) Fail("a product is started without a fence");
    StartedProduct started;
    for (int l = 0; l < kWarpSize; ++l) {
      started.lanes[l] = *static_cast<const Product*>(handed_in[l]);
      const Product& lane = started.lanes[l];
      if (ProductOfGroup(lane) != ProductOfGroup(started.lanes[0])) {
        Fail("the lanes of a warp start different products");
      }
      if (lane.a != nullptr) std::copy_n(lane.a, 4, started.a[l].begin());
    }
    auto& group_products = g_block.products_of_groups[warp / kWarpsPerGroup];
    if (products.num_started == group_products.size())
      group_products.emplace_back(started.lanes[0]);
    if (group_products[products.num_started++] != ProductOfGroup(started.lanes[0])) {
      Fail("the warps of a warpgroup start different products");
    }
    const auto [sums, is_new] = products.sums.try_emplace(started.lanes[0].d);
    for (int l = 0; is_new && l < kWarpSize; ++l) {
      float* d = started.lanes[l].d;
      const int size = started.lanes[l].num_columns / 2;
      sums->second[l].assign(d, d + size);
      for (int i = 0; i < size; ++i) std::memcpy(d + i, &kUnderWay, 4);
    }
    products.groups.back().products.push_back(started);
  });
}

void CommitProducts() {
  MeetWarp("wgmma.commit_group", nullptr, [](void* const*) {
    WarpProducts& products = ProductsOfWarp();
    products.is_fenced = false;
    if (g_block.random() % 2 == 0) {
      ComputeGroups(g_block.current / kWarpSize, products.groups.size());
    }
    products.groups.emplace_back();
  });
  YieldSometimes();
}

void WaitProducts(size_t pending) {
  MeetWarp("wgmma.wait_group", nullptr, [pending](void* const*) {
    const int warp = g_block.current / kWarpSize;
    WarpProducts& products = ProductsOfWarp();
    products.is_fenced = false;
    if (products.groups.size() - 1 <= pending) return;
    ComputeGroups(warp, products.groups.size() - 1 - pending);
    while (products.groups.size() - 1 > pending) {
      const ProductGroup group = std::move(products.groups.front());
      products.groups.erase(products.groups.begin());
      for (const StartedProduct& started : group.products) {
        const auto is_of = [&](const StartedProduct& other) {
          return other.lanes[0].d == started.lanes[0].d;
        };
        bool goes_on = false;
        for (const ProductGroup& later : products.groups) {
          goes_on |= std::any_of(later.products.begin(), later.products.end(), is_of);
        }
        const auto sums = products.sums.find(started.lanes[0].d);
        if (goes_on || sums == products.sums.end()) continue;
        for (int l = 0; l < kWarpSize; ++l) {
          float* d = started.lanes[l].d;
          for (size_t i = 0; i < sums->second[l].size(); ++i) {
            if (std::memcmp(d + i, &kUnderWay, 4) != 0) Fail("sums were written under way");
            d[i] = sums->second[l][i];
          }
        }
        products.sums.erase(sums);
      }
    }
  });
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

cudaError_t OutcomeOf(const char* call) {
  const char* failing = std::getenv("XLA_GPU_SIMT_FAIL");
  const size_t size = std::strlen(call);
  if (failing == nullptr || std::strncmp(failing, call, size) != 0) return cudaSuccess;
  if (failing[size] == '=') return static_cast<cudaError_t>(std::atoi(failing + size + 1));
  return failing[size] == 0 ? cudaErrorUnknown : cudaSuccess;
}

cudaError_t Launch(const std::function<void()>& kernel, const cudaLaunchConfig_t& config) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const unsigned num_blocks = config.gridDim.x;
  const int num_threads = static_cast<int>(config.blockDim.x);
  const size_t shared_bytes = config.dynamicSmemBytes;
  g_failure.clear();
  if (const char* log = std::getenv("XLA_GPU_SIMT_LAUNCHES")) {
    std::ofstream(log, std::ios::app) << num_blocks << ' ' << num_threads << '\n';
  }
  if (num_threads % kWarpSize != 0) g_failure = "the block is not made of whole warps";
  if (shared_bytes > kMaxSharedBytes) g_failure = "too much shared memory";
  if (!g_failure.empty()) return cudaErrorLaunchFailure;
  const SegfaultGuard guard;
  const size_t page = 4096, size = (shared_bytes + page - 1) / page * page;
  // Shared memory ends at a guard page.
  char* memory = static_cast<char*>(
      mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(memory + size, page, PROT_NONE);
  g_block.kernel = &kernel;
  g_block.begins_early = config.numAttrs > 0;
  g_block.shared_bytes = (shared_bytes + 15) / 16 * 16;
  g_block.shared = memory + size - g_block.shared_bytes;
  g_block.random.seed(Seed());
  gridDim.x = num_blocks;
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
  return g_failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace simt

cudaError_t cudaGetDevice(int* device) {
  *device = simt::Seed() * 1000 + simt::Capability();
  return simt::OutcomeOf("cudaGetDevice");
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  constexpr int kMultiprocessors[] = {1, 2, 3, 4, 5, 8, 132};  // an H100 has 132
  const int capability = device % 1000;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors[device / 1000 % 7];
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability % 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 1024 * (capability == 80                            ? 163
                       : capability == 90 || capability / 10 == 10 ? 227
                                                                   : 99);
  }
  return simt::OutcomeOf("cudaDeviceGetAttribute");
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? simt::g_failure.c_str() : "unknown error";
}
