// The instruction set, by opcode.
#pragma once

#include <string>
#include <unordered_map>

#include "program.h"

namespace emulated_gpu {

using Table = std::unordered_map<std::string, Execute>;

void AddIntegers(Table* table);
void AddFloats(Table* table);

// Opcodes with many modifiers. They set what the instruction needs to know of them, and return
// false if they are not theirs or unknown. `words`: the parts of the opcode between its dots.
using Words = std::vector<std::string>;
bool DecodeMemory(const Words& words, Instruction* instruction);
bool DecodeTensorCore(const Words& words, Instruction* instruction);
bool DecodeSynchronization(const Words& words, Instruction* instruction);
bool DecodeTensorCopy(const Words& words, Instruction* instruction);

}  // namespace emulated_gpu
