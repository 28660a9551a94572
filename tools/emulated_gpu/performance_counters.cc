// Counts what a kernel's speed depends on: instructions by class, wavefronts of shared memory,
// sectors of global memory.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <set>

#include "machine.h"

namespace emulated_gpu {
namespace {

bool Begins(const std::string& opcode, const char* with) { return opcode.rfind(with, 0) == 0; }

// The class of an opcode: that of the first prefix that it begins with.
const char* ClassOf(const Instruction& i) {
  static constexpr std::pair<const char*, const char*> kClasses[] = {
      {"mma", "products"},      {"wgmma.mma", "products"}, {"ldmatrix", "matrices"},
      {"stmatrix", "matrices"}, {"cp.async.c", "copies"},  {"cp.async.bulk", "copies"},
      {"ld", "loads"},          {"st", "stores"},          {"atom", "atomics"},
      {"red.", "atomics"},      {"shfl", "exchanges"},     {"vote", "exchanges"},
      {"redux", "exchanges"},   {"bra", "branches"},       {"ret", "branches"},
      {"exit", "branches"},     {"ex2", "special"},        {"rcp", "special"},
      {"bar", "waits"},         {"mbarrier", "waits"},     {"cp", "waits"},
      {"fence", "waits"},       {"wgmma", "waits"},        {"griddepcontrol", "waits"}};
  for (const auto& [begin, name] : kClasses) {
    if (Begins(i.opcode, begin)) return name;
  }
  const std::string type = i.opcode.substr(i.opcode.rfind('.') + 1);
  return type[0] == 'f' || Begins(type, "bf") ? "floats" : type[0] == 'b' ? "bits" : "integers";
}

using Addresses = std::array<uint64_t, kLanes>;

Addresses AddressesOf(const Warp& w, const Operand& operand) {
  Addresses addresses{};
  ForActive(w.active,
            [&](int lane) { addresses[static_cast<size_t>(lane)] = w.Address(operand, lane); });
  return addresses;
}

// The wavefronts of an access: lanes of a group that together have 128 bytes take one, and one more
// for each further word of the busiest of the 32 banks.
void CountShared(const Warp& w, const Addresses& addresses, uint32_t lanes, int bytes,
                 Counters* counters) {
  const int group = std::min(kLanes, 128 / std::max(4, bytes));
  for (int first = 0; first < kLanes; first += group) {
    std::set<uint64_t> words;
    for (int lane = first; lane < first + group; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      const uint64_t address = addresses[static_cast<size_t>(lane)];
      for (int byte = 0; byte < bytes; byte += 4) {
        words.insert((address + static_cast<uint64_t>(byte)) / 4);
      }
    }
    if (words.empty()) continue;
    std::array<uint64_t, 32> of_bank{};
    for (const uint64_t word : words) ++of_bank[word % 32];
    const uint64_t wavefronts = *std::max_element(of_bank.begin(), of_bank.end());
    counters->shared_accesses += 1;
    counters->shared_wavefronts += wavefronts;
    counters->conflicts[w.block->instruction->line] += wavefronts - 1;
  }
}

void CountGlobal(const Warp& w, const Addresses& addresses, int bytes, Counters* counters) {
  std::set<uint64_t> sectors;
  ForActive(w.active, [&](int lane) {
    const uint64_t first = addresses[static_cast<size_t>(lane)];
    for (uint64_t at = first / 32; at * 32 < first + static_cast<uint64_t>(bytes); ++at) {
      sectors.insert(at);
    }
    counters->global_bytes += static_cast<uint64_t>(bytes);
  });
  counters->global_sectors += sectors.size();
}

void CountAccess(const Warp& w, const Instruction& i, const Operand& place, int bytes,
                 Counters* counters) {
  const Addresses addresses = AddressesOf(w, place);
  uint64_t any = addresses[static_cast<size_t>(w.LowestLane())];
  const Space space = SpaceOf(i, &any);
  if (space == Space::kShared) CountShared(w, addresses, w.active, bytes, counters);
  if (space == Space::kGlobal) CountGlobal(w, addresses, bytes, counters);
}

}  // namespace

// Called before the instruction is executed, as it may overwrite its address.
void Count(const Warp& w, const Instruction& i, Counters* counters) {
  ++counters->classes[ClassOf(i)];
  const std::string& opcode = i.opcode;
  if (Begins(opcode, "ldmatrix") || Begins(opcode, "stmatrix")) {
    const Operand& place = i.At(Begins(opcode, "ld") ? 1 : 0);
    const uint32_t lanes = i.count == 4 ? kAllLanes : (1u << 8 * i.count) - 1;
    CountShared(w, AddressesOf(w, place), lanes, 16, counters);
  } else if (Begins(opcode, "cp.async.c")) {
    if (i.NumOperands() < 3) return;  // commit_group
    const int bytes = static_cast<int>(w.Integer(i.At(2), w.LowestLane()));
    CountShared(w, AddressesOf(w, i.At(0)), w.active, bytes, counters);
    const uint64_t before = counters->global_sectors;
    CountGlobal(w, AddressesOf(w, i.At(1)), bytes, counters);
    if (i.NumOperands() > 4 && w.Integer(i.At(4), w.LowestLane()) == kEvictFirst) {
      counters->evict_first_sectors += counters->global_sectors - before;
    }
  } else if (Begins(opcode, "ld.") && i.space != Space::kParam) {
    CountAccess(w, i, i.At(i.NumOperands() - 1), i.size * i.count, counters);
  } else if (Begins(opcode, "st.")) {
    CountAccess(w, i, i.At(0), i.size * i.count, counters);
  }
}

void Counters::Add(const Counters& other) {
  for (const auto& [name, number] : other.classes) classes[name] += number;
  for (const auto& [line, number] : other.conflicts) conflicts[line] += number;
  shared_accesses += other.shared_accesses;
  shared_wavefronts += other.shared_wavefronts;
  global_bytes += other.global_bytes;
  global_sectors += other.global_sectors;
  evict_first_sectors += other.evict_first_sectors;
}

// A line of JSON.
void Counters::Write(const std::string& kernel, const char* path) const {
  std::ofstream file(path, std::ios::app);
  file << "{\"kernel\": \"" << kernel << "\", \"instructions\": {";
  const char* separator = "";
  for (const auto& [name, number] : classes) {
    file << separator << '"' << name << "\": " << number;
    separator = ", ";
  }
  file << "}, \"conflicts\": {";
  separator = "";
  for (const auto& [line, number] : conflicts) {
    if (number == 0) continue;
    file << separator << '"' << line << "\": " << number;
    separator = ", ";
  }
  file << "}, \"blocks\": " << blocks << ", \"longest_block\": " << longest_block
       << ", \"shared_accesses\": " << shared_accesses
       << ", \"shared_wavefronts\": " << shared_wavefronts << ", \"global_bytes\": " << global_bytes
       << ", \"global_sectors\": " << global_sectors
       << ", \"evict_first_sectors\": " << evict_first_sectors << "}\n";
}

}  // namespace emulated_gpu
