// Barriers of the block, of the warp and in shared memory; exchange between lanes; fences.
#include <algorithm>
#include <cstdio>

#include "machine.h"
#include "tables.h"

namespace emulated_gpu {
namespace {

// Whether all lanes of the mask are here. If not, the others must still come.
bool AreHere(Warp& w, uint32_t mask, const char* what) {
  if ((mask & w.alive) != mask) Fail(std::string(what) + " names lanes that have ended");
  if ((w.active & ~mask) != 0)
    Fail(std::string(what) + " is executed by lanes that its mask does not name");
  return w.active == mask;
}

enum ShuffleMode { kUp, kDown, kButterfly, kIndex };

// shfl.sync d[|p], a, b, c, mask
Outcome Shuffle(Warp& w, const Instruction& i) {
  const int extra = i.NumOperands() - 5;
  const Operand &d = i.At(0), &a = i.At(1 + extra);
  const uint32_t mask = w.Lanes<uint32_t>(i, 4 + extra)[w.LowestLane()];
  if (!AreHere(w, mask, "shfl.sync")) return Outcome::kBlocked;
  const uint32_t *b = w.Lanes<uint32_t>(i, 2 + extra), *c = w.Lanes<uint32_t>(i, 3 + extra);
  const uint32_t* values = w.Lanes<uint32_t>(a);
  uint32_t results[kLanes], in_range = 0;
  ForActive(w.active, [&](int lane) {
    const int shift = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(c[lane] & 31);
    const int segment = static_cast<int>(c[lane] >> 8 & 31);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int from = lane;
    bool is_in_range = false;
    switch (i.number) {
      case kUp:
        from = lane - shift;
        is_in_range = from >= most;
        break;
      case kDown:
        from = lane + shift;
        is_in_range = from <= most;
        break;
      case kButterfly:
        from = lane ^ shift;
        is_in_range = from <= most;
        break;
      default:
        from = least | (shift & ~segment);
        is_in_range = from <= most;
    }
    if (!is_in_range) from = lane;
    w.block->lane = lane;
    if (!(mask >> from & 1)) Fail("shfl.sync reads a lane that takes no part");
    results[lane] = values[from];
    in_range |= static_cast<uint32_t>(is_in_range) << lane;
  });
  uint32_t* to = w.Lanes<uint32_t>(d);
  ForActive(w.active, [&](int lane) { to[lane] = results[lane]; });
  if (extra == 1 && i.At(1).slot >= 0) {
    uint32_t& p = w.Predicate(i.At(1));
    p = (p & ~w.active) | in_range;
  }
  return Outcome::kDone;
}

enum VoteMode { kAny, kAll, kUniform, kBallot };

// vote.sync d, p, mask
Outcome Vote(Warp& w, const Instruction& i) {
  const uint32_t mask = w.Lanes<uint32_t>(i, 2)[w.LowestLane()];
  if (!AreHere(w, mask, "vote.sync")) return Outcome::kBlocked;
  const uint32_t votes = w.PredicateValue(i.At(1)) & mask;
  if (i.number == kBallot) {
    uint32_t* d = w.Lanes<uint32_t>(i, 0);
    ForActive(w.active, [=](int lane) { d[lane] = votes; });
    return Outcome::kDone;
  }
  const bool result = i.number == kAny   ? votes != 0
                      : i.number == kAll ? votes == mask
                                         : votes == 0 || votes == mask;
  uint32_t& d = w.Predicate(i.At(0));
  d = (d & ~w.active) | (result ? w.active : 0);
  return Outcome::kDone;
}

// redux.sync d, a, mask: number: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor
Outcome Reduce(Warp& w, const Instruction& i) {
  const uint32_t mask = w.Lanes<uint32_t>(i, 2)[w.LowestLane()];
  if (!AreHere(w, mask, "redux.sync")) return Outcome::kBlocked;
  const uint32_t* a = w.Lanes<uint32_t>(i, 1);
  uint32_t result = a[w.LowestLane()];
  bool is_first = true;
  ForActive(w.active, [&](int lane) {
    if (is_first) {
      is_first = false;
      return;
    }
    const auto less = [&](uint32_t x, uint32_t y) {
      return i.is_signed ? static_cast<int32_t>(x) < static_cast<int32_t>(y) : x < y;
    };
    switch (i.number) {
      case 0:
        result += a[lane];
        break;
      case 1:
        result = less(a[lane], result) ? a[lane] : result;
        break;
      case 2:
        result = less(result, a[lane]) ? a[lane] : result;
        break;
      case 3:
        result &= a[lane];
        break;
      case 4:
        result |= a[lane];
        break;
      default:
        result ^= a[lane];
    }
  });
  uint32_t* d = w.Lanes<uint32_t>(i, 0);
  ForActive(w.active, [=](int lane) { d[lane] = result; });
  return Outcome::kDone;
}

// elect.sync d|p, mask: the lowest lane
Outcome Elect(Warp& w, const Instruction& i) {
  const uint32_t mask = w.Lanes<uint32_t>(i, 2)[w.LowestLane()];
  if (!AreHere(w, mask, "elect.sync")) return Outcome::kBlocked;
  const uint32_t leader = static_cast<uint32_t>(w.LowestLane());
  if (i.At(0).slot >= 0)
    ForActive(w.active, [&](int lane) { w.Lanes<uint32_t>(i, 0)[lane] = leader; });
  uint32_t& p = w.Predicate(i.At(1));
  p = (p & ~w.active) | (1u << leader);
  return Outcome::kDone;
}

Outcome SyncWarp(Warp& w, const Instruction& i) {
  const uint32_t mask = w.Lanes<uint32_t>(i, 0)[w.LowestLane()];
  // A constant mask of all lanes is what compilers write for lanes that have not ended.
  if (!AreHere(w, mask, "bar.warp.sync")) return Outcome::kBlocked;
  w.Step();
  return Outcome::kDone;
}

Outcome ActiveMask(Warp& w, const Instruction& i) {
  uint32_t* d = w.Lanes<uint32_t>(i, 0);
  ForActive(w.active, [&](int lane) { d[lane] = w.active; });
  return Outcome::kDone;
}

enum BarrierMode { kSync, kArrive, kReduceAny, kReduceAll, kReduceCount };

// bar.sync a[, b]; bar.arrive a, b; bar.red d, a[, b], p
Outcome MeetAtBarrier(Warp& w, const Instruction& i) {
  if (w.active != w.alive) return Outcome::kBlocked;  // the others must come, too
  const bool reduces = i.number >= kReduceAny;
  const int first = reduces ? 1 : 0, num_operands = i.NumOperands() - (reduces ? 2 : 0);
  const uint64_t number = w.Integer(i.At(first), w.LowestLane());
  if (number >= w.block->barriers.size()) Fail("there is no barrier " + std::to_string(number));
  BlockBarrier& barrier = w.block->barriers[number];
  if (!w.is_waiting) {
    const bool is_whole_block = num_operands < 2;
    const int expected =
        is_whole_block ? 0 : static_cast<int>(w.Integer(i.At(first + 1), w.LowestLane()));
    if (!is_whole_block && (expected <= 0 || expected % kLanes != 0))
      Fail("a barrier of " + std::to_string(expected) + " threads, which are no whole warps");
    if (barrier.arrived > 0 &&
        (barrier.is_whole_block != is_whole_block || barrier.expected != expected)) {
      Fail("threads wait at barrier " + std::to_string(number) +
           " for different numbers of threads");
    }
    if (barrier.warps >> w.number & 1)
      Fail("a warp arrives twice at barrier " + std::to_string(number));
    barrier.warps |= 1u << w.number;
    barrier.is_whole_block = is_whole_block;
    barrier.expected = expected;
    barrier.arrived += kLanes;
    barrier.arriving.Add(w.seen);
    w.Step();
    if (reduces) {
      const uint32_t votes = w.PredicateValue(i.At(i.NumOperands() - 1)) & w.active;
      barrier.any |= votes != 0;
      barrier.all &= votes == w.active;
      barrier.num_true += __builtin_popcount(votes);
    }
    w.awaited_phase = barrier.phase;
    w.block->progressed = true;
    w.block->CheckBarrier(&barrier);
    if (i.number == kArrive) return Outcome::kDone;
    w.is_waiting = true;
  }
  if (barrier.phase == w.awaited_phase) return Outcome::kBlocked;
  w.is_waiting = false;
  w.seen.Add(barrier.released);
  if (i.number == kReduceAny || i.number == kReduceAll) {
    const bool result = i.number == kReduceAny ? barrier.any_before : barrier.all_before;
    uint32_t& d = w.Predicate(i.At(0));
    d = (d & ~w.active) | (result ? w.active : 0);
  } else if (i.number == kReduceCount) {
    uint32_t* d = w.Lanes<uint32_t>(i, 0);
    ForActive(w.active,
              [&](int lane) { d[lane] = static_cast<uint32_t>(barrier.num_true_before); });
  }
  return Outcome::kDone;
}

Outcome InitMemoryBarrier(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    const uint64_t address = SharedAddress(w, i.At(0), lane);
    w.block->lane = lane;
    const int count = static_cast<int>(w.Integer(i.At(1), lane));
    if (count < 1 || count >= 1 << 20)
      Fail("an mbarrier of " + std::to_string(count) + " arrivals");
    if (w.block->memory_barriers.count(address) != 0) Fail("an mbarrier is initialized twice");
    w.block->shared.MarkBarrier(w, lane, address, true);
    MemoryBarrier barrier{};
    barrier.expected = barrier.pending = count;
    barrier.clock = kMaxWarps + w.block->memory_barriers.size() % kCopyClocks;
    barrier.init_warp = w.number;
    barrier.init_step = w.seen.generic[static_cast<size_t>(w.number)];
    w.block->memory_barriers.emplace(address, barrier);
  });
  return Outcome::kDone;
}

void ExpectBytes(MemoryBarrier* barrier, int64_t bytes) {
  constexpr int64_t kMost = (1 << 20) - 1;
  barrier->bytes += bytes;
  if (barrier->bytes > kMost || barrier->bytes < -kMost)
    Fail("an mbarrier that expects " + std::to_string(barrier->bytes) + " bytes");
}

// mbarrier.arrive state, [address][, count]
// mbarrier.arrive.expect_tx state, [address], bytes
template <bool kExpectsBytes>
Outcome ArriveAtMemoryBarrier(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    uint64_t count = i.NumOperands() > 2 ? w.Integer(i.At(2), lane) : 1;
    const uint64_t address = SharedAddress(w, i.At(1), lane);
    MemoryBarrier& barrier = FindBarrier(w, lane, address);
    if (i.At(0).slot >= 0) w.Lanes<uint64_t>(i, 0)[lane] = barrier.phase;
    if (kExpectsBytes) {
      ExpectBytes(&barrier, static_cast<int64_t>(count));
      count = 1;
    }
    for (; count > 0; --count) ArriveAt(w.block, &w, lane, address);
  });
  return Outcome::kDone;
}

// mbarrier.expect_tx [address], bytes; mbarrier.complete_tx [address], bytes: kSign of them
template <int kSign>
Outcome CountBytes(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    MemoryBarrier& barrier = FindBarrier(w, lane, SharedAddress(w, i.At(0), lane));
    ExpectBytes(&barrier, kSign * static_cast<int64_t>(w.Integer(i.At(1), lane)));
    CheckPhase(w.block, &barrier);
  });
  return Outcome::kDone;
}

// cp.async.mbarrier.arrive[.noinc] [address]: once the lane's copies are there.
Outcome ArriveAfterCopies(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    const uint64_t address = SharedAddress(w, i.At(0), lane);
    MemoryBarrier& barrier = FindBarrier(w, lane, address);
    if (i.number == 0) ++barrier.pending;  // not noinc
    w.queues[static_cast<size_t>(lane)].push_back(
        {Pending::kArrive, 0, 0, i.line, address, nullptr});
  });
  w.block->progressed = true;
  return Outcome::kDone;
}

// mbarrier.{try,test}_wait[.parity] p, [address], phase. try_wait waits as long as it likes: mostly
// until the phase is over for some lane. So does test_wait here, which would be called in a loop.
// Where instructions are counted, both do so always: how often a warp asks again depends on others.
Outcome WaitForMemoryBarrier(Warp& w, const Instruction& i) {
  uint32_t is_over = 0;
  ForActive(w.active, [&](int lane) {
    const MemoryBarrier& barrier = FindBarrier(w, lane, SharedAddress(w, i.At(1), lane));
    const uint64_t phase = w.Integer(i.At(2), lane);
    const bool is = i.number == 1 ? (barrier.phase & 1) != (phase & 1) : barrier.phase != phase;
    is_over |= static_cast<uint32_t>(is) << lane;
  });
  if (is_over == 0 && (w.block->counters != nullptr || w.block->random() % 16 != 0)) {
    return Outcome::kBlocked;
  }
  ForActive(is_over, [&](int lane) {
    w.seen.Add(FindBarrier(w, lane, SharedAddress(w, i.At(1), lane)).released);
  });
  uint32_t& p = w.Predicate(i.At(0));
  p = (p & ~w.active) | is_over;
  return Outcome::kDone;
}

// The barrier's memory is free.
Outcome InvalidateMemoryBarrier(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    const uint64_t address = SharedAddress(w, i.At(0), lane);
    FindBarrier(w, lane, address);
    w.block->memory_barriers.erase(address);
    w.block->shared.MarkBarrier(w, lane, address, false);
  });
  return Outcome::kDone;
}

// What this warp has seen, the async proxy sees from now on.
Outcome FenceAsyncProxy(Warp& w, const Instruction&) {
  Join(&w.seen.async, w.seen.generic);
  w.Step();
  return Outcome::kDone;
}

// fence.mbarrier_init: the async proxy sees the barriers that this warp has initialized.
Outcome FenceBarriers(Warp& w, const Instruction&) {
  for (auto& [address, barrier] : w.block->memory_barriers)
    barrier.is_fenced |= barrier.init_warp == w.number;
  return Outcome::kDone;
}

Outcome Nothing(Warp&, const Instruction&) { return Outcome::kDone; }

Outcome FenceGlobal(Warp& w, const Instruction&) {
  global_order.Fence(&w);
  return Outcome::kDone;
}

// A barrier, wait or fence that was removed. Says once that it was reached.
Outcome Removed(Warp&, const Instruction& i) {
  static int32_t said = 0;
  if (said != i.line) std::fprintf(stderr, "emulated GPU: reached line %d\n", i.line);
  said = i.line;
  return Outcome::kDone;
}

// What a wait that was removed waited for seems to be there.
Outcome PretendIsOver(Warp& w, const Instruction& i) {
  w.Predicate(i.At(0)) |= w.active;
  return Removed(w, i);
}

Outcome WaitForKernelsBefore(Warp& w, const Instruction&) {
  w.has_waited = true;
  return Outcome::kDone;
}

Outcome LetNextKernelBegin(Warp&, const Instruction&) {
  lets_next_begin = 1;
  return Outcome::kDone;
}

Outcome SetRegisters(Warp& w, const Instruction& i) {
  if (w.active != w.alive) return Outcome::kBlocked;
  const uint64_t count = w.Integer(i.At(0), 0);
  if (count < 24 || count > 256 || count % 8 != 0) Fail("setmaxnreg of " + std::to_string(count));
  return Outcome::kDone;
}

bool Has(const Words& words, const char* word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Whether all words but the first are among these.
bool AreKnown(const Words& words, std::initializer_list<const char*> known) {
  return std::all_of(words.begin() + 1, words.end(), [&](const std::string& word) {
    return std::find(known.begin(), known.end(), word) != known.end();
  });
}

}  // namespace

uint64_t SharedAddress(const Warp& w, const Operand& operand, int lane) {
  const uint64_t address = w.Address(operand, lane);
  return address >= kSharedWindow ? address - kSharedWindow : address;
}

MemoryBarrier& FindBarrier(Warp& w, int lane, uint64_t address) {
  w.block->lane = lane;
  const auto found = w.block->memory_barriers.find(address);
  if (found == w.block->memory_barriers.end())
    Fail("no mbarrier at shared address " + std::to_string(address));
  MemoryBarrier& barrier = found->second;
  if (barrier.init_warp != w.number &&
      barrier.init_step > w.seen.generic[static_cast<size_t>(barrier.init_warp)]) {
    Fail("a race: an mbarrier is used without a barrier after its mbarrier.init");
  }
  return barrier;
}

void ArriveAt(Block* block, Warp* warp, int lane, uint64_t address) {
  MemoryBarrier& barrier = FindBarrier(*warp, lane, address);
  barrier.arriving.Add(warp->seen);
  warp->Step();
  block->progressed = true;
  if (--barrier.pending < 0) Fail("more arrivals than the mbarrier expects");
  CheckPhase(block, &barrier);
}

void CheckPhase(Block* block, MemoryBarrier* barrier) {
  if (barrier->pending > 0 || barrier->bytes != 0) return;
  barrier->released = barrier->arriving;
  barrier->arriving = {};
  barrier->pending = barrier->expected;
  ++barrier->phase;
  block->progressed = true;
}

bool RemoveWait(Instruction* i) {
  for (const char* name : {"mbarrier.try_wait", "mbarrier.test_wait"}) {
    if (i->opcode.compare(0, std::string(name).size(), name) != 0) continue;
    i->execute = PretendIsOver;
    return true;
  }
  for (const char* name :
       {"bar.sync", "bar.arrive", "bar.warp.sync", "cp.async.wait_group",
        "cp.async.mbarrier.arrive", "mbarrier.arrive", "mbarrier.init", "mbarrier.expect_tx",
        "fence.proxy", "fence.mbarrier_init", "wgmma.fence", "wgmma.wait_group",
        "wgmma.commit_group", "griddepcontrol.wait"}) {
    if (i->opcode.compare(0, std::string(name).size(), name) != 0) continue;
    i->execute = Removed;
    return true;
  }
  return false;
}

bool DecodeSynchronization(const Words& words, Instruction* i) {
  const std::string& name = words[0];
  if (name == "bar" && Has(words, "warp")) {
    i->execute = SyncWarp;
    i->is_collective = true;
  } else if (name == "bar" || name == "barrier") {
    i->execute = MeetAtBarrier;
    i->is_collective = true;
    i->number = Has(words, "arrive") ? kArrive
                : !Has(words, "red") ? kSync
                : Has(words, "or")   ? kReduceAny
                : Has(words, "and")  ? kReduceAll
                                     : kReduceCount;
  } else if (name == "shfl" && Has(words, "sync")) {
    i->execute = Shuffle;
    i->is_collective = true;
    i->number = Has(words, "up")     ? kUp
                : Has(words, "down") ? kDown
                : Has(words, "bfly") ? kButterfly
                                     : kIndex;
  } else if (name == "vote" && Has(words, "sync")) {
    i->execute = Vote;
    i->is_collective = true;
    i->number = Has(words, "any")   ? kAny
                : Has(words, "all") ? kAll
                : Has(words, "uni") ? kUniform
                                    : kBallot;
  } else if (name == "redux") {
    const char* const operations[] = {"add", "min", "max", "and", "or", "xor"};
    i->execute = Reduce;
    i->is_collective = true;
    i->is_signed = words.back()[0] == 's';
    for (int k = 0; k < 6; ++k) {
      if (Has(words, operations[k])) i->number = k;
    }
  } else if (name == "elect") {
    i->execute = Elect;
    i->is_collective = true;
  } else if (name == "activemask") {
    i->execute = ActiveMask;
  } else if (name == "cp" && Has(words, "mbarrier")) {
    i->execute = ArriveAfterCopies;
    i->number = Has(words, "noinc");
  } else if (name == "mbarrier" && words.size() > 1) {
    // An address of this block's shared memory is one of the cluster's, too.
    if (!AreKnown(words, {"init", "inval", "arrive", "expect_tx", "complete_tx", "try_wait",
                          "test_wait", "parity", "acquire", "release", "relaxed", "cta", "cluster",
                          "shared", "shared::cta", "shared::cluster", "b64"}))
      return false;
    // expect_tx and complete_tx order nothing; an arrival or a wait that does not is not known.
    const bool only_counts = words[1] == "expect_tx" || words[1] == "complete_tx";
    if (Has(words, "relaxed") && !only_counts) return false;
    if (words[1] == "init")
      i->execute = InitMemoryBarrier;
    else if (words[1] == "inval")
      i->execute = InvalidateMemoryBarrier;
    else if (words[1] == "arrive")
      i->execute =
          Has(words, "expect_tx") ? ArriveAtMemoryBarrier<true> : ArriveAtMemoryBarrier<false>;
    else if (only_counts)
      i->execute = words[1] == "expect_tx" ? CountBytes<1> : CountBytes<-1>;
    else if (words[1] == "try_wait" || words[1] == "test_wait")
      i->execute = WaitForMemoryBarrier;
    else
      return false;
    i->number = Has(words, "parity");
  } else if (name == "fence" && Has(words, "proxy")) {  // of shared memory, or of all
    if (!AreKnown(words, {"proxy", "async", "shared::cta", "shared::cluster", "global"}))
      return false;
    i->execute = words.back() == "global" ? Nothing : FenceAsyncProxy;
  } else if (name == "fence" && Has(words, "mbarrier_init")) {
    i->execute = FenceBarriers;
  } else if (name == "fence" || name == "membar") {
    const bool orders_blocks =
        Has(words, "gpu") || Has(words, "sys") || Has(words, "gl");  // for membar, gl is gpu
    i->execute = orders_blocks ? FenceGlobal : Nothing;
  } else if (name == "nanosleep") {
    i->execute = Nothing;
  } else if (name == "griddepcontrol") {
    i->execute = Has(words, "wait") ? WaitForKernelsBefore : LetNextKernelBegin;
  } else if (name == "setmaxnreg") {
    i->execute = SetRegisters;
    i->is_collective = true;
  } else {
    return false;
  }
  return true;
}

}  // namespace emulated_gpu
