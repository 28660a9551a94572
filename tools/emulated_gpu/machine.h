// A thread block in execution: its warps, its shared memory, its barriers. Block after block is
// executed, and of a block warp after warp until it has to wait.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "program.h"

namespace emulated_gpu {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;
inline constexpr uint64_t kSharedWindow = uint64_t{1} << 62;  // of generic addresses
inline constexpr uint64_t kLocalWindow = uint64_t{1} << 61;
inline constexpr uint64_t kParamWindow = uint64_t{1} << 60;
inline constexpr int kMaxWarps = 32;
// What copies to an mbarrier do is counted by the mbarrier, with others if there are more.
inline constexpr int kCopyClocks = 32;
inline constexpr uint32_t kSum = 1 << 16;

// A vector clock: a warp has seen everything that warp w did before w's step clock[w], and the
// copies up to number clock[kMaxWarps + b] of the mbarriers b.
using Clock = std::array<uint32_t, kMaxWarps + kCopyClocks>;

void Join(Clock* clock, const Clock& other);

// What warps have seen, and which part of it the async proxy sees.
struct Seen {
  Clock generic{}, async{};
  void Add(const Seen& other) {
    Join(&generic, other.generic);
    Join(&async, other.async);
  }
};

// What has been done in thread blocks, by the block's number.
using View = std::map<uint32_t, Clock>;

struct Trap : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An access to shared memory, as others have to be in order with it.
struct Word {
  uint32_t write_step = 0;
  uint8_t write_warp = 0;
  uint8_t write_lane = 0;
  uint8_t write_bytes = 0;    // of the last write
  uint8_t written_bytes = 0;  // ever
  uint8_t copies_in_flight = 0;
  uint8_t last_was_copy = 0;
  uint8_t is_barrier = 0;
  uint32_t copy_line = 0;
};

struct Block;

class SharedMemory {
 public:
  void Reset(Block* block, int bytes, int num_warps);
  // The bytes at an address, for a lane's read or write. Throws a Trap if the access is out of
  // bounds, misaligned, in a race or, for a read, of bytes that were never written.
  const char* Read(const Warp& warp, int lane, uint64_t address, int bytes,
                   uint32_t used_bytes = ~0u);
  char* Write(const Warp& warp, int lane, uint64_t address, int bytes);
  // Whether these bytes are there already, and writing them again is in no race.
  bool Holds(uint64_t address, int bytes, const char* value) const;
  // `is_async`: the async proxy copies, which must see what was written there before.
  void BeginCopy(const Warp& warp, int lane, uint64_t address, int bytes, int line, bool is_async);
  // `writer` and `step`: the clock that tells who has seen the copy.
  char* EndCopy(size_t writer, int lane, uint32_t step, uint64_t address, int bytes);
  // For the products of a warpgroup, which began with what their warp had seen then.
  const char* ReadAsync(const Warp& warp, const Seen& began, uint64_t address, int bytes);
  void MarkBarrier(const Warp& warp, int lane, uint64_t address, bool is_barrier);
  const char* bytes() const { return bytes_.data(); }
  int size() const { return size_; }

 private:
  void CheckBounds(uint64_t address, int bytes) const;
  void CheckWrite(const Warp& warp, int lane, uint64_t first, uint64_t last);

  std::vector<char> bytes_;
  std::vector<Word> words_;
  std::vector<uint32_t> reads_;  // [word][warp]: the last step that read it, plus one
  int size_ = 0, num_warps_ = 0;
  // Whether kernels may read what they never wrote (NaN in every type), if they do not use it.
  bool allows_unwritten_ = false;
  // Whether products may read what cp.async wrote without fence.proxy.async, as Triton's do.
  bool allows_unfenced_copies_ = false;
  // Whether threads may write the same in any order, as Triton's do when roles are handed out.
  bool allows_equal_writes_ = false;
};

// The plain writes of a kernel to global memory, and what its atomics and fences let other thread
// blocks see. A plain read of what another block has written must be in order with that. Only whole
// words of 4 bytes are known: several blocks may write to parts of one.
class GlobalOrder {
 public:
  void Reset();
  void Write(const Warp& warp, uint64_t address, int bytes);
  void CheckRead(const Warp& warp, uint64_t address, int bytes);
  // A read by the async proxy. What the kernel itself has written, it may not read: the fence that
  // this needs is not known.
  void CheckAsyncRead(uint64_t address) const;
  // An atomic of a lane. Later ones at the same address hand on what it releases.
  void Atomic(Warp* warp, uint64_t address, bool acquires, bool releases);
  void Fence(Warp* warp);

 private:
  struct Stamp {
    uint32_t block = 0;  // plus one; 0: not written
    uint32_t step = 0;
    uint8_t warp = 0;
  };
  static constexpr uint64_t kPage = 4096;  // bytes

  std::map<uint64_t, std::vector<Stamp>> pages_;  // of words
  std::map<uint64_t, View> released_;             // by address
};
extern GlobalOrder global_order;

// An asynchronous copy of a lane, or what follows it in the lane's queue.
struct Pending {
  enum Kind : uint8_t { kCopy, kCommit, kArrive } kind;
  uint8_t bytes, valid_bytes;
  int32_t line;
  uint64_t to;
  const char* from;
};

// A product of a warpgroup that one of its warps has started.
struct Product {
  const Instruction* instruction;
  Seen began;
  uint64_t a_descriptor, b_descriptor;
  bool accumulates, a_is_mn_major, b_is_mn_major;
  std::vector<uint32_t> a;  // [register][lane], unless it is in shared memory
};

struct Fragment {  // lanes at one instruction
  int pc;
  uint32_t lanes;
  bool is_blocked;
};

struct Warp {
  Block* block;
  int number;
  char* registers;
  std::vector<char> local;  // memory of each lane
  uint32_t active;          // lanes that execute the current instruction
  uint32_t alive;           // lanes that have not exited
  std::vector<Fragment> fragments;
  Fragment current;
  Seen seen;
  bool is_waiting = false;                           // at a barrier of the block
  uint32_t awaited_phase = 0;                        // of that barrier
  std::vector<std::vector<Pending>> queues;          // of each lane
  std::vector<std::vector<Product>> product_groups;  // committed; the last one is open
  std::vector<uint32_t> register_steps;  // by slot / 64: the wgmma.fence before its last write
  // By slot / 64: products in flight that read it, and kSum times those that write it.
  std::vector<uint32_t> busy;
  uint32_t fences = 1;
  int products_in_flight = 0;
  bool has_waited = false;  // griddepcontrol.wait
  View fenced;              // what the warp's atomics release since its last fence
  View observed;            // what its next fence acquires

  template <typename T>
  T* Lanes(const Operand& operand) {
    return reinterpret_cast<T*>(registers + operand.slot);
  }
  template <typename T>
  T* Lanes(const Instruction& instruction, int operand) {
    return Lanes<T>(instruction.At(operand));
  }
  uint32_t& Predicate(const Operand& operand) {
    return *reinterpret_cast<uint32_t*>(registers + operand.slot);
  }
  uint32_t PredicateValue(const Operand& operand) {
    const uint32_t value =
        operand.is_constant && operand.size > 0
            ? (*reinterpret_cast<uint32_t*>(registers + operand.slot) ? kAllLanes : 0)
            : Predicate(operand);
    return operand.negated ? ~value : value;
  }
  // An integer of a lane, whatever the register's size; the upper bits are zero.
  uint64_t Integer(const Operand& operand, int lane) const;
  uint64_t Address(const Operand& operand, int lane) const {
    return Integer(operand, lane) + static_cast<uint64_t>(operand.offset);
  }
  void Step() { ++seen.generic[static_cast<size_t>(number)]; }
  int LowestLane() const { return __builtin_ctz(active); }
};

struct BlockBarrier {
  int expected = 0;  // 0: nobody waits
  int arrived = 0;   // threads
  uint32_t phase = 0;
  bool any = false, all = true;
  int num_true = 0;
  bool is_whole_block = false;
  Seen arriving;
  Seen released;
  bool any_before = false, all_before = false;
  int num_true_before = 0;
  uint32_t warps = 0;  // that have arrived
};

// What a warp has seen of other thread blocks, from a step on.
struct Acquired {
  int warp;
  uint32_t step;
  View view;
};

struct MemoryBarrier {
  int expected, pending;
  int64_t bytes = 0;  // that are still to arrive in this phase
  uint32_t phase = 0;
  size_t clock = 0;        // of its copies
  bool is_fenced = false;  // fence.mbarrier_init
  Seen arriving, released;
  int init_warp;
  uint32_t init_step;
};

// A CUtensorMap: a tensor of up to 5 dimensions in global memory, the innermost first, and the box
// that is copied of it. Dimensions that it lacks have one element.
struct TensorMap {
  uint64_t mark;  // kTensorMap
  uint64_t address;
  std::array<uint64_t, 5> sizes;    // elements
  std::array<uint64_t, 5> strides;  // bytes
  std::array<uint32_t, 5> box;      // elements
  uint8_t rank;
  uint8_t span;  // bytes that the swizzle exchanges units of 16 bytes in; 16: none
};
inline constexpr uint64_t kTensorMap = 0x70616d726f736e65;
static_assert(sizeof(TensorMap) <= 128);

// A copy by the async proxy from global to shared memory, whose bytes an mbarrier counts.
struct TensorCopy {
  const Instruction* instruction;
  Warp* warp;
  int lane;
  TensorMap map;
  std::array<int32_t, 5> first;  // element of the box
  uint64_t to, barrier;
};

// Policies of createpolicy. What GPUs have in these registers is not documented.
constexpr int32_t kEvictNormal = 1, kEvictFirst = 2;

// What speed depends on.
struct Counters {
  std::map<std::string, uint64_t> classes;  // instructions of warps
  uint64_t blocks = 0;
  uint64_t longest_block = 0;         // instructions of its warps
  uint64_t shared_accesses = 0;       // by lanes that together have 128 bytes, at most
  uint64_t shared_wavefronts = 0;     // as many, if no bank is asked for two words at once
  std::map<int, uint64_t> conflicts;  // the others, by the line of the instruction
  uint64_t global_bytes = 0;
  uint64_t global_sectors = 0;       // of 32 bytes
  uint64_t evict_first_sectors = 0;  // of these, what cp.async reads with that policy

  void Add(const Counters& other);
  void Write(const std::string& kernel, const char* path) const;
};
void Count(const Warp& w, const Instruction& i, Counters* counters);

// What a program does that writes to its arrays while a kernel runs: a number changes after some
// reads. A test sets it (tests/support/gpu.py).
struct Change {
  const char* kernel;       // a part of the name of the kernels that read; null: none
  const char *begin, *end;  // the array whose reads count
  uint64_t reads;           // after which the number changes
  uint64_t every;           // further reads after which it changes again; 0: only once
  char* place;              // of the number
  uint64_t bytes;           // 4 or 8
  uint64_t value;           // the other one
  uint64_t counted;         // reads so far

  void Read(const char* from, int num_bytes);
};
extern "C" __attribute__((visibility("default"))) Change number_change;

// Whether the last kernel has let the next one begin. After a call it must not have: tests look.
extern "C" __attribute__((visibility("default"))) int lets_next_begin;

struct Launch {
  const Kernel* kernel;
  std::array<unsigned, 3> grid, threads;
  int shared_bytes;
  bool begins_early;
  std::vector<char> parameters;
  uint32_t environment = 0;  // %envreg0
  bool has_change = false;
};

struct Block {
  const Launch* launch;
  std::array<unsigned, 3> index;
  uint32_t number = 0;
  std::vector<Warp> warps;
  std::vector<Acquired> acquired;
  SharedMemory shared;
  std::array<BlockBarrier, 16> barriers;
  std::map<uint64_t, MemoryBarrier> memory_barriers;
  std::vector<TensorCopy> tensor_copies;           // in flight
  std::array<uint32_t, kCopyClocks> copy_steps{};  // copies that have arrived
  // Maps in global memory: the warps, and their steps, that have fenced them.
  std::map<uint64_t, std::vector<std::pair<size_t, uint32_t>>> tensor_maps;
  std::mt19937 random;
  bool has_races_checked = true;
  // Whether copies of the async proxy may count at barriers that were not fenced, as Triton's do.
  bool allows_unfenced_barriers = false;
  int lane = 0;  // for error messages
  const Instruction* instruction = nullptr;
  Warp* warp = nullptr;
  bool progressed = false;
  uint64_t num_instructions = 0;
  Counters* counters = nullptr;                    // null: nothing is counted
  uint64_t most_instructions = uint64_t{1} << 31;  // with more, the kernel does not end

  void Run();
  void CheckBarrier(BlockBarrier* barrier);
  int AliveWarps() const;
};

[[noreturn]] void Fail(const std::string& message);

// The place in a lane's global memory. Throws a Trap if it is misaligned or certainly not there.
char* GlobalAddress(const Warp& warp, int lane, uint64_t address, int bytes);

// The space of an access, and the address in it.
Space SpaceOf(const Instruction& i, uint64_t* address);

// Completes a lane's copies up to the first entry of its queue that is not done.
void CompleteCopies(Warp* warp, int lane, size_t num_entries);
// Completes some lane's copies up to an arrival. Returns false if there are none in flight.
bool CompleteSomeCopies(Block* block);
// Completes copies of the async proxy in any order, until a phase of an mbarrier ends or all have
// arrived. Returns false if there are none in flight.
bool CompleteTensorCopies(Block* block);
void ArriveAt(Block* block, Warp* warp, int lane, uint64_t address);
MemoryBarrier& FindBarrier(Warp& w, int lane, uint64_t address);
// Ends the barrier's phase if all threads have arrived and all bytes.
void CheckPhase(Block* block, MemoryBarrier* barrier);

uint64_t SharedAddress(const Warp& w, const Operand& operand, int lane);

// Where 16 bytes of a matrix in shared memory lie: the number of a row of 128 bytes exchanges the
// units of 16 bytes in a span of 128, 64 or 32 bytes. It repeats every 1024 bytes.
inline uint64_t Swizzled(uint64_t address, uint64_t span) {
  return address ^ ((address >> 7 & (span / 16 - 1)) << 4);
}

// cuTensorMapEncodeTiled of the driver.
extern "C" __attribute__((visibility("default"))) int PtxEncodeTiled(
    void* to, int type, uint32_t rank, void* address, const uint64_t* sizes,
    const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
    int swizzle, int l2_promotion, int fill);

// What the environment says of the GPU (cudart.cc): whether a call fails, and 90 for 9.0.
int OutcomeOf(const char* call);
int Capability();

// Executes a kernel. Throws a Trap.
void RunKernel(const Launch& launch, unsigned seed);

template <typename F>
inline void ForActive(uint32_t active, F function) {
  if (active == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) function(lane);
  } else {
    for (uint32_t left = active; left != 0; left &= left - 1) function(__builtin_ctz(left));
  }
}

}  // namespace emulated_gpu
