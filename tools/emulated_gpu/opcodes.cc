#include "tables.h"

namespace emulated_gpu {

bool Decode(const std::string& opcode, Instruction* instruction) {
  static const Table table = [] {
    Table all;
    AddIntegers(&all);
    AddFloats(&all);
    return all;
  }();
  std::string name = opcode;
  // setp.lt.and.s32 combines its result with an operand.
  int number = 1;
  if (name.compare(0, 5, "setp.") == 0) {
    for (const char* combination : {".and.", ".or.", ".xor."}) {
      if (const size_t place = name.find(combination); place != std::string::npos) {
        name.erase(place, std::string(combination).size() - 1);
        instruction->number = number;
      }
      ++number;
    }
  }
  if (const auto found = table.find(name); found != table.end()) {
    instruction->execute = found->second;
    return true;
  }
  Words words(1);
  for (const char c : opcode) {
    if (c == '.')
      words.emplace_back();
    else
      words.back() += c;
  }
  for (const auto decode :
       {DecodeMemory, DecodeSynchronization, DecodeTensorCore, DecodeTensorCopy}) {
    Instruction tried = *instruction;
    if (decode(words, &tried) && tried.execute != nullptr) {
      *instruction = std::move(tried);
      return true;
    }
  }
  return false;
}

}  // namespace emulated_gpu
