// Loads, stores, atomics and asynchronous copies.
#include <algorithm>
#include <cstring>

#include "lanes.h"

namespace emulated_gpu {

uint64_t Warp::Integer(const Operand& operand, int lane) const {
  const char* values = registers + operand.slot;
  switch (operand.size) {
    case 1:
      return reinterpret_cast<const uint8_t*>(values)[lane];
    case 2:
      return reinterpret_cast<const uint16_t*>(values)[lane];
    case 4:
      return reinterpret_cast<const uint32_t*>(values)[lane];
    default:
      return reinterpret_cast<const uint64_t*>(values)[lane];
  }
}

Change number_change = {};

void Change::Read(const char* from, int num_bytes) {
  if (from + num_bytes <= begin || end <= from || ++counted < reads) return;
  if (every == 0 ? counted > reads : (counted - reads) % every > 0) return;
  std::swap_ranges(place, place + bytes, reinterpret_cast<char*>(&value));
}

char* GlobalAddress(const Warp& warp, int lane, uint64_t address, int bytes) {
  warp.block->lane = lane;
  if (address % static_cast<uint64_t>(bytes) != 0) {
    Fail("a misaligned access of " + std::to_string(bytes) + " bytes at global address " +
         std::to_string(address));
  }
  if (address < 4096 || address >> 47 != 0)
    Fail("an access at address " + std::to_string(address) + ", where no global memory can be");
  if (warp.block->launch->begins_early && !warp.has_waited)
    Fail("an access to global memory before griddepcontrol.wait");
  return reinterpret_cast<char*>(address);
}

Space SpaceOf(const Instruction& i, uint64_t* address) {
  if (i.space != Space::kGeneric) return i.space;
  for (const auto& [space, window] : {std::pair(Space::kShared, kSharedWindow),
                                      {Space::kLocal, kLocalWindow},
                                      {Space::kParam, kParamWindow}}) {
    if (*address < window) continue;
    *address -= window;
    return space;
  }
  return Space::kGlobal;
}

namespace {

// The number at one lane's place of a register, extended to the size of the register.
template <typename T>
void Put(Warp& w, const Operand& to, int lane, const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  switch (to.size) {
    case 1:
      w.Lanes<uint8_t>(to)[lane] = static_cast<uint8_t>(value);
      break;
    case 2:
      w.Lanes<uint16_t>(to)[lane] = static_cast<uint16_t>(value);
      break;
    case 4:
      w.Lanes<uint32_t>(to)[lane] = static_cast<uint32_t>(value);
      break;
    default:
      w.Lanes<uint64_t>(to)[lane] = static_cast<uint64_t>(value);
  }
}

char* LocalAddress(Warp& w, int lane, uint64_t address, int bytes) {
  const uint64_t size = w.local.size() / kLanes;
  if (address + static_cast<uint64_t>(bytes) > size || address % static_cast<uint64_t>(bytes) != 0)
    Fail("an access outside of the thread's local memory, or misaligned");
  return w.local.data() + static_cast<uint64_t>(lane) * size + address;
}

const char* Source(Warp& w, const Instruction& i, int lane, uint64_t address, int bytes) {
  const Space space = SpaceOf(i, &address);
  w.block->lane = lane;
  if (space == Space::kLocal) return LocalAddress(w, lane, address, bytes);
  if (space == Space::kShared) return w.block->shared.Read(w, lane, address, bytes, i.used_bytes);
  if (space == Space::kGlobal) {
    const char* source = GlobalAddress(w, lane, address, bytes);
    if (w.block->has_races_checked) global_order.CheckRead(w, address, bytes);
    return source;
  }
  const std::vector<char>& parameters = w.block->launch->parameters;
  if (address + static_cast<uint64_t>(bytes) > parameters.size() ||
      address % static_cast<uint64_t>(bytes) != 0) {
    Fail("a read outside of the parameters, or misaligned");
  }
  return parameters.data() + address;
}

template <typename T>
Outcome Load(Warp& w, const Instruction& i) {
  const int bytes = static_cast<int>(sizeof(T)) * i.count;
  const Operand& from = i.At(i.NumOperands() - 1);
  ForActive(w.active, [&](int lane) {
    const char* source = Source(w, i, lane, w.Address(from, lane), bytes);
    for (size_t k = 0; k < i.count; ++k) {
      if (i.operands[k].slot >= 0) Put<T>(w, i.operands[k], lane, source + k * sizeof(T));
    }
    if (w.block->launch->has_change) number_change.Read(source, bytes);
  });
  return Outcome::kDone;
}

void Write(Warp& w, const Instruction& i, int lane, uint64_t address, const char* value,
           int bytes) {
  const Space space = SpaceOf(i, &address);
  w.block->lane = lane;
  char* to = nullptr;
  if (space == Space::kLocal) {
    to = LocalAddress(w, lane, address, bytes);
  } else if (space == Space::kShared) {
    if (w.block->shared.Holds(address, bytes, value)) return;
    to = w.block->shared.Write(w, lane, address, bytes);
  } else {
    to = GlobalAddress(w, lane, address, bytes);
    if (w.block->has_races_checked) global_order.Write(w, address, bytes);
  }
  std::memcpy(to, value, static_cast<size_t>(bytes));
}

template <typename T>
Outcome Store(Warp& w, const Instruction& i) {
  const int bytes = static_cast<int>(sizeof(T)) * i.count;
  const Operand& to = i.At(0);
  ForActive(w.active, [&](int lane) {
    T values[4];
    for (size_t k = 0; k < i.count; ++k) {
      values[k] = static_cast<T>(w.Integer(i.operands[k + 1], lane));
    }
    Write(w, i, lane, w.Address(to, lane), reinterpret_cast<const char*>(values), bytes);
  });
  return Outcome::kDone;
}

// atom d, [address], b[, c]  or  red [address], b: one lane after the other. number: what it
// orders, and whether it replaces b by c instead of adding b.
constexpr int kAcquires = 1, kReleases = 2, kReplaces = 4;

template <typename T>
Outcome Atomic(Warp& w, const Instruction& i) {
  const bool has_result = i.opcode[0] == 'a';
  const Operand &address = i.At(has_result ? 1 : 0), &summand = i.At(has_result ? 2 : 1);
  ForActive(w.active, [&](int lane) {
    uint64_t at = w.Address(address, lane);
    w.block->lane = lane;
    if (SpaceOf(i, &at) != Space::kGlobal) Fail("an atomic that is not in global memory");
    char* place = GlobalAddress(w, lane, at, sizeof(T));
    global_order.Atomic(&w, at, (i.number & kAcquires) != 0, (i.number & kReleases) != 0);
    T before;
    std::memcpy(&before, place, sizeof(T));
    const T operand = static_cast<T>(w.Integer(summand, lane));
    T after = static_cast<T>(before + operand);
    if ((i.number & kReplaces) != 0) {
      after = before == operand ? static_cast<T>(w.Integer(i.At(3), lane)) : before;
    }
    std::memcpy(place, &after, sizeof(T));
    if (has_result && i.At(0).slot >= 0) w.Lanes<T>(i, 0)[lane] = before;
  });
  return Outcome::kDone;
}

// red.add [address], {summands}: flushed, one lane after the other, in order with nothing.
Outcome AddInMemory(Warp& w, const Instruction& i) {
  const int bytes = static_cast<int>(sizeof(float)) * i.count;
  ForActive(w.active, [&](int lane) {
    uint64_t at = w.Address(i.At(0), lane);
    w.block->lane = lane;
    if (SpaceOf(i, &at) != Space::kGlobal) Fail("an atomic that is not in global memory");
    float sums[4];
    const char* place = GlobalAddress(w, lane, at, bytes);
    if (w.block->has_races_checked) global_order.CheckRead(w, at, bytes);
    std::memcpy(sums, place, static_cast<size_t>(bytes));
    for (size_t k = 0; k < i.count; ++k) {
      const float summand = BitCast<float>(static_cast<U32>(w.Integer(i.operands[k + 1], lane)));
      sums[k] = Flush(Flush(sums[k]) + Flush(summand));
    }
    Write(w, i, lane, at, reinterpret_cast<const char*>(sums), bytes);
  });
  return Outcome::kDone;
}

// createpolicy.fractional policy[, fraction]: for all of an access.
Outcome CreatePolicy(Warp& w, const Instruction& i) {
  if (i.NumOperands() > 1) Fail("a policy for a fraction");
  const auto policy = static_cast<uint64_t>(i.number);
  ForActive(w.active, [&](int lane) { w.Lanes<uint64_t>(i, 0)[lane] = policy; });
  return Outcome::kDone;
}

// cp.async [to], [from], bytes[, valid bytes][, cache policy], which decides nothing here
Outcome CopyAsync(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    w.block->lane = lane;
    const int bytes = static_cast<int>(w.Integer(i.At(2), lane));
    uint64_t valid = static_cast<uint64_t>(bytes);
    if (i.NumOperands() > 3) valid = w.Integer(i.At(3), lane);
    if (bytes != 4 && bytes != 8 && bytes != 16)
      Fail("a copy of " + std::to_string(bytes) + " bytes");
    if (valid > static_cast<uint64_t>(bytes)) Fail("a copy from more bytes than to");
    const uint64_t to = w.Address(i.At(0), lane), from = w.Address(i.At(1), lane);
    const char* source = nullptr;
    if (valid > 0) source = GlobalAddress(w, lane, from, bytes);
    w.block->shared.BeginCopy(w, lane, to, bytes, i.line, false);
    w.queues[static_cast<size_t>(lane)].push_back({Pending::kCopy, static_cast<uint8_t>(bytes),
                                                   static_cast<uint8_t>(valid), i.line, to,
                                                   source});
  });
  return Outcome::kDone;
}

Outcome CommitCopies(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    w.queues[static_cast<size_t>(lane)].push_back({Pending::kCommit, 0, 0, i.line, 0, nullptr});
  });
  return Outcome::kDone;
}

// Copies arrive now, as late as they may.
Outcome WaitForCopies(Warp& w, const Instruction& i) {
  ForActive(w.active, [&](int lane) {
    std::vector<Pending>& queue = w.queues[static_cast<size_t>(lane)];
    if (i.number == 1) {  // wait_all
      CompleteCopies(&w, lane, queue.size());
      return;
    }
    uint64_t groups = w.Integer(i.At(0), lane);
    size_t end = queue.size();
    for (; end > 0; --end) {
      if (queue[end - 1].kind == Pending::kCommit && groups-- == 0) break;
    }
    CompleteCopies(&w, lane, end);
  });
  return Outcome::kDone;
}

}  // namespace

void CompleteCopies(Warp* warp, int lane, size_t num_entries) {
  std::vector<Pending>& queue = warp->queues[static_cast<size_t>(lane)];
  for (size_t k = 0; k < num_entries; ++k) {
    const Pending& entry = queue[k];
    if (entry.kind == Pending::kArrive) ArriveAt(warp->block, warp, lane, entry.to);
    if (entry.kind != Pending::kCopy) continue;
    const size_t writer = static_cast<size_t>(warp->number);
    char* to = warp->block->shared.EndCopy(writer, lane, warp->seen.generic[writer], entry.to,
                                           entry.bytes);
    if (entry.valid_bytes > 0) std::memcpy(to, entry.from, entry.valid_bytes);
    std::memset(to + entry.valid_bytes, 0, static_cast<size_t>(entry.bytes - entry.valid_bytes));
  }
  queue.erase(queue.begin(), queue.begin() + static_cast<long>(num_entries));
}

bool CompleteSomeCopies(Block* block) {
  if (block->random() % 2 == 0 && CompleteTensorCopies(block)) return true;
  const size_t num_lanes = block->warps.size() * kLanes;
  const size_t begin = block->random() % num_lanes;
  for (size_t k = 0; k < num_lanes; ++k) {
    const size_t thread = (begin + k) % num_lanes;
    Warp& warp = block->warps[thread / kLanes];
    const std::vector<Pending>& queue = warp.queues[thread % kLanes];
    for (size_t end = 0; end < queue.size(); ++end) {
      if (queue[end].kind != Pending::kArrive) continue;
      CompleteCopies(&warp, static_cast<int>(thread % kLanes), end + 1);
      return true;
    }
  }
  return CompleteTensorCopies(block);
}

bool DecodeMemory(const Words& words, Instruction* i) {
  const std::string &name = words[0], &type = words.back();
  if (name == "cp" && words.size() > 1 && words[1] == "async") {
    if (words.size() > 2 && words[2] == "commit_group")
      i->execute = CommitCopies;
    else if (words.size() > 2 && words[2] == "wait_group")
      i->execute = WaitForCopies;
    else if (words.size() > 2 && words[2] == "wait_all")
      i->execute = WaitForCopies, i->number = 1;
    else if (words.size() > 2 && (words[2] == "ca" || words[2] == "cg"))
      i->execute = CopyAsync;
    else
      return false;
    return true;
  }
  if (i->opcode == "createpolicy.fractional.L2::evict_normal.b64" ||
      i->opcode == "createpolicy.fractional.L2::evict_first.b64") {
    i->execute = CreatePolicy;
    i->number = i->opcode.find("first") == std::string::npos ? kEvictNormal : kEvictFirst;
    return true;
  }
  if (name != "ld" && name != "st" && name != "atom" && name != "red") return false;
  for (const std::string& word : words) {
    if (word == "global") i->space = Space::kGlobal;
    if (word == "shared" || word == "shared::cta") i->space = Space::kShared;
    if (word == "param") i->space = Space::kParam;
    if (word == "local") i->space = Space::kLocal;
    if (word == "v2") i->count = 2;
    if (word == "v4") i->count = 4;
  }
  i->size = static_cast<uint8_t>(SizeOfType(type));
  if (name == "atom" || name == "red") {
    const auto has = [&](const char* word) {
      return std::find(words.begin(), words.end(), word) != words.end();
    };
    if (name == "red" && has("add") && type == "f32") {
      i->execute = AddInMemory;
      return i->space == Space::kGlobal;
    }
    if (!(has("add") || has("cas")) || type[0] == 'f') return false;
    i->execute = i->size == 8 ? Atomic<uint64_t> : Atomic<uint32_t>;
    if (has("cas")) i->number |= kReplaces;
    if (!has("cta") && !has("cluster")) {  // those order nothing between any two blocks
      if (has("acquire") || has("acq_rel")) i->number |= kAcquires;
      if (has("release") || has("acq_rel")) i->number |= kReleases;
    }
    return i->size >= 4 && (i->space == Space::kGlobal || i->space == Space::kGeneric);
  }
  const bool loads = name == "ld", is_signed = type[0] == 's';
  switch (i->size) {
    case 1:
      i->execute = !loads ? Store<uint8_t> : is_signed ? Load<int8_t> : Load<uint8_t>;
      break;
    case 2:
      i->execute = !loads ? Store<uint16_t> : is_signed ? Load<int16_t> : Load<uint16_t>;
      break;
    case 4:
      i->execute = !loads ? Store<uint32_t> : is_signed ? Load<int32_t> : Load<uint32_t>;
      break;
    case 8:
      i->execute = loads ? Load<uint64_t> : Store<uint64_t>;
      break;
    default:
      return false;
  }
  return true;
}

}  // namespace emulated_gpu
