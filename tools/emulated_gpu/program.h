// A kernel in PTX, ready to be executed: registers, constants and instructions with their operands.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulated_gpu {

struct Warp;
struct Instruction;

// What happened to the lanes that executed an instruction.
enum class Outcome {
  kDone,
  kBlocked,  // they must execute it again once other lanes, warps or copies have progressed
  kBranch,   // they go to the target
  kExit,
};

using Execute = Outcome (*)(Warp& warp, const Instruction& instruction);

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kParam, kLocal };

// The bytes of a type's values, 0 for a predicate.
int SizeOfType(const std::string& type);

struct Operand {
  int32_t slot = -1;  // offset of its 32 values in the registers of a warp; -1: none, or `_`
  uint8_t size = 0;   // bytes of each value; 0: a predicate, whose values are the bits of one word
  bool negated = false;  // of a predicate
  bool is_constant = false;
  int64_t offset = 0;  // of an address: to add
};

struct Instruction {
  Execute execute = nullptr;
  int32_t guard = -1;  // slot of the predicate
  bool guard_negated = false;
  bool is_collective = false;  // lanes meet there: those without the guard go on alone
  bool is_wgmma = false;
  int32_t target = -1;  // of a branch
  int32_t line = 0;     // in the PTX
  // What the opcode says, for the instructions that need it.
  Space space = Space::kGeneric;
  uint8_t size = 0;  // of an element
  bool is_signed = false;
  uint8_t count = 1;              // of elements of a vector, of columns / 8 of a product
  int32_t number = 0;             // of the operation's own meaning
  uint32_t used_bytes = ~0u;      // of a load: a bit for each byte that the program uses
  std::vector<Operand> operands;  // vectors are spread out
  int num_results = 0;            // operands of the text that it writes, at its beginning
  std::vector<int> first;         // the place of each operand of the text in `operands`
  std::string opcode;

  const Operand& At(int operand) const { return operands[static_cast<size_t>(first[operand])]; }
  int NumOperands() const { return static_cast<int>(first.size()); }
};

struct Kernel {
  std::string name;
  int target = 0;  // 80 for sm_80
  int max_threads = 0;
  std::vector<int> parameter_offsets;
  std::vector<int> parameter_sizes;
  int parameter_bytes = 0;
  int shared_bytes = 0;  // beside the dynamic ones, which follow
  int local_bytes = 0;
  int register_bytes = 0;
  std::vector<Instruction> code;
  // Values that a warp's registers hold from the start.
  struct Constant {
    int32_t slot;
    uint8_t size;
    uint64_t value;
  };
  std::vector<Constant> constants;
  std::vector<std::pair<int32_t, std::string>> specials;  // slots of 4 bytes, and %tid.x and so on
  bool has_wgmma = false;
};

// A kernel of a text in PTX, or null. Throws std::runtime_error with the line of what it does not
// know.
std::shared_ptr<Kernel> Parse(const std::string& text, const std::string& name);

// Sets how the instruction is executed. Returns false if its opcode is unknown.
bool Decode(const std::string& opcode, Instruction* instruction);

// Makes a barrier, a wait or a fence do nothing. Returns false if the instruction is none of them.
bool RemoveWait(Instruction* instruction);

// Gives registers whose lives do not overlap the same slots.
struct VirtualRegister {
  std::string name;
  int size;
};
void PlaceRegisters(Kernel* kernel, const std::vector<VirtualRegister>& registers);

}  // namespace emulated_gpu
