// Registers whose lives do not overlap share their place, so that a warp's registers fit into the
// processor's cache.
#include <algorithm>
#include <map>

#include "program.h"

namespace emulated_gpu {
namespace {

using Bits = std::vector<uint64_t>;

void Set(Bits* bits, size_t i) { (*bits)[i / 64] |= uint64_t{1} << i % 64; }
void Clear(Bits* bits, size_t i) { (*bits)[i / 64] &= ~(uint64_t{1} << i % 64); }

// Calls `uses` and `sets` with the registers of an instruction. A register that may keep its value
// is both.
template <typename Uses, typename Sets>
void Visit(const Instruction& i, Uses uses, Sets sets) {
  const size_t num_set =
      static_cast<size_t>(i.num_results == 0 ? 0 : i.first[static_cast<size_t>(i.num_results)]);
  for (size_t k = 0; k < num_set; ++k) {
    if (i.operands[k].slot >= 0) sets(static_cast<size_t>(i.operands[k].slot));
  }
  if (i.guard >= 0) uses(static_cast<size_t>(i.guard));
  const bool keeps = i.guard >= 0 || i.is_wgmma;
  for (size_t k = keeps ? 0 : num_set; k < i.operands.size(); ++k) {
    if (i.operands[k].slot >= 0) uses(static_cast<size_t>(i.operands[k].slot));
  }
}

struct CodeBlock {
  size_t begin, end;
  std::vector<size_t> next;
  Bits live_in, live_out;
};

// The blocks of the code, with what is live at their ends.
std::vector<CodeBlock> Analyze(const std::vector<Instruction>& code, size_t num_registers) {
  std::vector<bool> begins(code.size() + 1);
  begins[0] = begins[code.size()] = true;
  for (size_t i = 0; i < code.size(); ++i) {
    if (code[i].target < 0) continue;
    begins[static_cast<size_t>(code[i].target)] = begins[i + 1] = true;
  }
  std::vector<CodeBlock> blocks;
  std::map<size_t, size_t> block_at;
  for (size_t i = 0; i < code.size(); ++i) {
    if (begins[i]) {
      block_at[i] = blocks.size();
      const Bits none((num_registers + 63) / 64);
      blocks.push_back({i, i, {}, none, none});
    }
    blocks.back().end = i + 1;
  }
  for (CodeBlock& block : blocks) {
    const Instruction& last = code[block.end - 1];
    if (last.target >= 0) block.next.push_back(block_at[static_cast<size_t>(last.target)]);
    if ((last.target < 0 || last.guard >= 0) && block.end < code.size())
      block.next.push_back(block_at[block.end]);
  }
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (size_t b = blocks.size(); b-- > 0;) {
      CodeBlock& block = blocks[b];
      for (const size_t next : block.next) {
        for (size_t k = 0; k < block.live_out.size(); ++k)
          block.live_out[k] |= blocks[next].live_in[k];
      }
      Bits live = block.live_out;
      for (size_t i = block.end; i-- > block.begin;) {
        Visit(code[i], [](size_t) {}, [&](size_t r) { Clear(&live, r); });
        Visit(code[i], [&](size_t r) { Set(&live, r); }, [](size_t) {});
      }
      has_changed |= live != block.live_in;
      block.live_in = std::move(live);
    }
  }
  return blocks;
}

}  // namespace

void PlaceRegisters(Kernel* kernel, const std::vector<VirtualRegister>& registers) {
  struct Life {
    size_t begin = SIZE_MAX, end = 0;  // instructions
  };
  std::vector<Life> lives(registers.size());
  const auto extend = [&](size_t r, size_t i) {
    lives[r].begin = std::min(lives[r].begin, i);
    lives[r].end = std::max(lives[r].end, i);
  };
  const std::vector<Instruction>& code = kernel->code;
  for (const CodeBlock& block : Analyze(code, registers.size())) {
    for (size_t r = 0; r < registers.size(); ++r) {
      if (block.live_in[r / 64] >> r % 64 & 1) extend(r, block.begin);
      if (block.live_out[r / 64] >> r % 64 & 1) extend(r, block.end);
    }
    for (size_t i = block.begin; i < block.end; ++i) {
      const auto extend_here = [&](size_t r) { extend(r, i); };
      Visit(code[i], extend_here, extend_here);
      if (!code[i].is_wgmma) continue;
      // The products read and write them until the wait.
      for (const Operand& operand : code[i].operands) {
        if (operand.slot >= 0) lives[static_cast<size_t>(operand.slot)] = {0, code.size()};
      }
    }
  }
  const auto keep = [&](int32_t slot) { lives[static_cast<size_t>(slot)] = {0, code.size()}; };
  for (const Kernel::Constant& constant : kernel->constants) keep(constant.slot);
  for (const auto& [slot, name] : kernel->specials) keep(slot);

  std::vector<size_t> order;
  for (size_t r = 0; r < registers.size(); ++r) {
    if (lives[r].begin != SIZE_MAX) order.push_back(r);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return lives[a].begin < lives[b].begin; });
  std::vector<int> slots(registers.size());
  std::map<int, std::vector<int>> free_slots;             // by size
  std::multimap<size_t, std::pair<int, int>> used_slots;  // by the end of their lives
  for (const size_t r : order) {
    while (!used_slots.empty() && used_slots.begin()->first < lives[r].begin) {
      const auto [size, slot] = used_slots.begin()->second;
      free_slots[size].push_back(slot);
      used_slots.erase(used_slots.begin());
    }
    // Only those of one size: lanes may be at different places in the code.
    const int size = registers[r].size;
    std::vector<int>& free = free_slots[size];
    if (free.empty()) {
      slots[r] = kernel->register_bytes;
      kernel->register_bytes += std::max(64, size * 32);
    } else {
      slots[r] = free.back();
      free.pop_back();
    }
    used_slots.emplace(lives[r].end, std::make_pair(size, slots[r]));
  }
  const auto place = [&](int32_t& slot) {
    if (slot >= 0) slot = slots[static_cast<size_t>(slot)];
  };
  for (Instruction& instruction : kernel->code) {
    place(instruction.guard);
    for (Operand& operand : instruction.operands) place(operand.slot);
  }
  for (Kernel::Constant& constant : kernel->constants) place(constant.slot);
  for (auto& [slot, name] : kernel->specials) place(slot);
}

}  // namespace emulated_gpu
