// Registers whose lives do not overlap share their place, so that a warp's registers fit into the
// processor's cache.
#include <algorithm>

#include "program.h"

namespace ptx {

void PlaceRegisters(Kernel* kernel, const std::vector<VirtualRegister>& registers) {
  std::vector<int> slots(registers.size());
  int bytes = 0;
  for (size_t i = 0; i < registers.size(); ++i) {
    slots[i] = bytes;
    bytes += std::max(64, registers[i].size * 32);
  }
  kernel->register_bytes = bytes;
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

}  // namespace ptx
