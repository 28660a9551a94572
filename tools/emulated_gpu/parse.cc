#include <cctype>
#include <cstring>
#include <stdexcept>

#include "program.h"

namespace emulated_gpu {
namespace {

bool StartsWith(const std::string& text, const char* prefix) {
  return text.compare(0, std::strlen(prefix), prefix) == 0;
}

std::string Trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\n\r"), end = text.find_last_not_of(" \t\n\r");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

// The parts between separators that are outside of brackets.
std::vector<std::string> Split(const std::string& text, const char* separators) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (depth == 0 && std::strchr(separators, c) != nullptr) {
      parts.push_back(Trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!Trimmed(part).empty()) parts.push_back(Trimmed(part));
  return parts;
}

std::vector<std::string> Words(const std::string& text) {
  std::vector<std::string> words;
  for (const std::string& word : Split(text, " \t\n\r")) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

// The bytes of an immediate operand. Most have the size of the instruction's type.
int SizeOfImmediate(const std::string& opcode, int operand) {
  const std::string type = opcode.substr(opcode.rfind('.') + 1);
  const bool is_shift = StartsWith(opcode, "shl") || StartsWith(opcode, "shr");
  const bool is_bit_field = StartsWith(opcode, "bfi") || StartsWith(opcode, "bfe");
  if ((is_shift && operand == 2) || (is_bit_field && operand >= (opcode[2] == 'i' ? 3 : 2)))
    return 4;
  if (StartsWith(opcode, "mad.wide") && operand == 3) return 2 * SizeOfType(type);
  for (const char* name :
       {"shfl", "vote", "bar", "mbarrier", "cp", "setmaxnreg", "wgmma", "prmt", "szext", "fence"}) {
    if (StartsWith(opcode, name)) return 4;
  }
  const int size = SizeOfType(type);
  return size > 0 ? size : 4;
}

class Parser {
 public:
  Parser(const std::string& text, const std::string& name) : text_(text), wanted_(name) {}

  std::shared_ptr<Kernel> Run() {
    while (SkipSpace()) {
      const std::string word = PeekWord();
      if (word == ".version" || word == ".address_size" || word == ".file") {
        SkipLine();
      } else if (word == ".target") {
        const std::string line = RestOfLine();
        target_ = std::atoi(line.substr(line.find("sm_") + 3).c_str());
      } else if (word == ".section") {
        Until("{");
        Until("}");
      } else if (word == ".extern" || word == ".global" || word == ".shared" || word == ".const") {
        DeclareShared(Until(";"), &module_shared_);
      } else if (word == ".visible" || word == ".entry" || word == ".weak") {
        if (ParseEntry()) return kernel_;
      } else {
        Fail("unknown directive " + word);
      }
    }
    return nullptr;
  }

 private:
  struct Symbol {
    Space space;
    int offset;
    bool is_dynamic;
  };
  struct Shared {
    std::map<std::string, Symbol> symbols;
    int bytes = 0;
  };

  [[noreturn]] void Fail(const std::string& message) const {
    throw std::runtime_error("PTX line " + std::to_string(line_) + ": " + message);
  }

  // Skips spaces and comments. Returns whether anything is left.
  bool SkipSpace() {
    while (at_ < text_.size()) {
      if (text_[at_] == '\n') ++line_;
      if (std::isspace(static_cast<unsigned char>(text_[at_])) || text_[at_] == 0) {
        ++at_;
      } else if (text_.compare(at_, 2, "//") == 0) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (text_.compare(at_, 2, "/*") == 0) {
        Skip(text_.find("*/", at_) + 2);
      } else {
        return true;
      }
    }
    return false;
  }

  void Skip(size_t to) {
    for (; at_ < to && at_ < text_.size(); ++at_) line_ += text_[at_] == '\n';
  }

  std::string PeekWord() const {
    size_t end = at_;
    while (end < text_.size() && !std::isspace(static_cast<unsigned char>(text_[end])) &&
           std::strchr(";{}(),", text_[end]) == nullptr) {
      ++end;
    }
    return text_.substr(at_, end - at_);
  }

  std::string RestOfLine() {
    const size_t end = std::min(text_.find('\n', at_), text_.size());
    const std::string line = text_.substr(at_, end - at_);
    at_ = end;
    return line;
  }
  void SkipLine() { RestOfLine(); }

  // The text up to one of these characters outside of brackets, without comments. Goes past it.
  std::string Until(const char* ends) {
    std::string found;
    int depth = 0;
    while (at_ < text_.size()) {
      if (text_.compare(at_, 2, "//") == 0 || text_.compare(at_, 2, "/*") == 0) {
        SkipSpace();
        found += ' ';
        continue;
      }
      const char c = text_[at_];
      if (c == '\n') ++line_;
      ++at_;
      if (depth == 0 && std::strchr(ends, c) != nullptr) return found;
      if (c == '{' || c == '(') ++depth;
      if (c == '}' || c == ')') --depth;
      found += c;
    }
    Fail("the text ends early");
  }

  // .shared .align 16 .b8 name[1024]
  void DeclareShared(const std::string& text, Shared* shared) {
    int align = 1, size = 0;
    std::string name;
    bool is_shared = false, is_local = false;
    const std::vector<std::string> words = Words(text.substr(0, text.find('=')));
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == ".shared") is_shared = true;
      if (words[i] == ".local") is_local = true;
      if (words[i] == ".align")
        align = std::atoi(words[++i].c_str());
      else if (words[i][0] == '.')
        size = std::max(size, SizeOfType(words[i].substr(1)));
      else
        name += words[i];
    }
    if (!is_shared && !is_local) return;  // a use of it is an unknown symbol
    const size_t bracket = name.find('[');
    bool is_dynamic = false;
    if (bracket != std::string::npos) {
      const int count = std::atoi(name.c_str() + bracket + 1);
      is_dynamic = count == 0;
      size *= count;
      name.resize(bracket);
    }
    int& bytes = is_local ? kernel_->local_bytes : shared->bytes;
    bytes = (bytes + align - 1) / align * align;
    shared->symbols[name] = {is_local ? Space::kLocal : Space::kShared, bytes, is_dynamic};
    bytes += size;
  }

  // Returns whether it is the kernel that is wanted.
  bool ParseEntry() {
    kernel_ = std::make_shared<Kernel>();
    kernel_->target = target_;
    shared_ = module_shared_;
    const std::vector<std::string> words = Words(Until("("));
    kernel_->name = words.back();
    if (kernel_->name != wanted_) {
      for (const char* end : {")", "{", "}"}) Until(end);
      return false;
    }
    for (const std::string& parameter : Split(Until(")"), ",")) DeclareParameter(parameter);
    for (const std::vector<std::string>& setting : {Words(Until("{"))}) {
      for (size_t i = 0; i + 1 < setting.size(); ++i) {
        if (setting[i] == ".maxntid" || setting[i] == ".reqntid") {
          int threads = 1;
          for (size_t j = i + 1; j < setting.size() && std::isdigit(setting[j][0]); ++j) {
            threads *= std::atoi(setting[j].c_str());
          }
          kernel_->max_threads = threads;
        }
      }
    }
    ParseBody();
    Finish();
    return true;
  }

  // .param .u64 .ptr .global .align 1 name
  void DeclareParameter(const std::string& text) {
    int align = 0, size = 0;
    std::string name;
    const std::vector<std::string> words = Words(text);
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == ".align")
        align = std::atoi(words[++i].c_str());
      else if (words[i][0] != '.')
        name = words[i];
      else if (words[i] != ".param" && size == 0)
        size = SizeOfType(words[i].substr(1));
    }
    bool is_pointer = text.find(".ptr") != std::string::npos;
    if (align == 0 || is_pointer) align = size;
    if (const size_t bracket = name.find('['); bracket != std::string::npos) {
      size *= std::atoi(name.c_str() + bracket + 1);
      name.resize(bracket);
    }
    int& bytes = kernel_->parameter_bytes;
    bytes = (bytes + align - 1) / align * align;
    shared_.symbols[name] = {Space::kParam, bytes, false};
    kernel_->parameter_offsets.push_back(bytes);
    kernel_->parameter_sizes.push_back(size);
    bytes += size;
  }

  void ParseBody() {
    scopes_.assign(1, Scope());
    while (!scopes_.empty()) {
      if (!SkipSpace()) Fail("the kernel does not end");
      const char c = text_[at_];
      if (c == '{') {
        scopes_.emplace_back();
        scopes_.back().number = ++num_scopes_;
        ++at_;
      } else if (c == '}') {
        scopes_.pop_back();
        ++at_;
      } else if (const std::string word = PeekWord(); word == ".loc" || word == ".file") {
        SkipLine();
      } else if (word.back() == ':') {
        last_label_ = word.substr(0, word.size() - 1);
        labels_[{scopes_.back().number, last_label_}] = static_cast<int>(kernel_->code.size());
        at_ += word.size();
      } else if (word == ".branchtargets") {
        tables_[last_label_] = Split(Until(";").substr(word.size()), ",");
      } else if (word == ".reg") {
        DeclareRegisters(Until(";"));
      } else if (word == ".shared" || word == ".local") {
        DeclareShared(Until(";"), &shared_);
      } else if (word[0] == '.') {
        const std::string pragma = Until(";");
        if (const size_t mask = pragma.find("used_bytes_mask"); mask != std::string::npos) {
          used_bytes_ = static_cast<uint32_t>(std::strtoul(pragma.c_str() + mask + 15, nullptr, 0));
        }
      } else {
        const int line = line_;
        const std::string statement = Until(";");
        if (StartsWith(statement, "brx.idx"))
          ParseBranches(Split(statement.substr(7), ","), line);
        else
          ParseInstruction(statement, line);
      }
    }
  }

  // .reg .b32 %r<10>, x
  void DeclareRegisters(const std::string& text) {
    std::string rest = Trimmed(text.substr(4));
    const size_t end = rest.find_first_of(" \t");
    const int size = SizeOfType(rest.substr(1, end - 1));
    for (const std::string& name : Split(rest.substr(end), ",")) {
      const size_t bracket = name.find('<');
      if (bracket == std::string::npos) {
        AddRegister(name, size);
      } else {
        const int count = std::atoi(name.c_str() + bracket + 1);
        for (int i = 0; i < count; ++i)
          AddRegister(name.substr(0, bracket) + std::to_string(i), size);
      }
    }
  }

  void AddRegister(const std::string& name, int size) {
    scopes_.back().registers[name] = static_cast<int>(registers_.size());
    registers_.push_back({name, size});
  }

  int FindRegister(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->registers.find(name);
      if (found != scope->registers.end()) return found->second;
    }
    return -1;
  }

  // brx.idx index, table: a branch for each entry of the table.
  void ParseBranches(const std::vector<std::string>& operands, int line) {
    const auto table = tables_.find(operands[1]);
    if (table == tables_.end()) Fail("unknown branch targets " + operands[1]);
    AddRegister("branches", 0);
    for (size_t k = 0; k < table->second.size(); ++k) {
      ParseInstruction("setp.eq.u32 branches, " + operands[0] + ", " + std::to_string(k), line);
      ParseInstruction("@branches bra " + table->second[k], line);
    }
  }

  void ParseInstruction(const std::string& statement, int line) {
    Instruction instruction;
    instruction.line = line;
    instruction.used_bytes = used_bytes_;
    used_bytes_ = ~0u;
    std::string text = Trimmed(statement);
    if (text[0] == '@') {
      const size_t end = text.find_first_of(" \t");
      instruction.guard_negated = text[1] == '!';
      const std::string name =
          text.substr(instruction.guard_negated ? 2 : 1, end - (instruction.guard_negated ? 2 : 1));
      instruction.guard = FindRegister(name);
      if (instruction.guard < 0) Fail("unknown predicate " + name);
      text = Trimmed(text.substr(end));
    }
    const size_t end = std::min(text.find_first_of(" \t\n"), text.size());
    instruction.opcode = text.substr(0, end);
    if (!Decode(instruction.opcode, &instruction)) {
      line_ = line;
      Fail("unknown instruction " + instruction.opcode);
    }
    const std::vector<std::string> operands = Split(text.substr(end), ",|");
    for (size_t i = 0; i < operands.size(); ++i) {
      instruction.first.push_back(static_cast<int>(instruction.operands.size()));
      AddOperands(operands[i], static_cast<int>(i), &instruction);
    }
    instruction.num_results = text.find('|') == std::string::npos ? 1 : 2;
    for (const char* name :
         {"st.", "red.", "bra", "bar.sync", "bar.arrive", "bar.warp", "cp.", "mbarrier.init",
          "mbarrier.expect_tx", "mbarrier.complete_tx", "fence", "tensormap", "stmatrix"}) {
      if (StartsWith(instruction.opcode, name)) instruction.num_results = 0;
    }
    if (operands.size() < 2) instruction.num_results = 0;
    kernel_->has_wgmma |= instruction.is_wgmma;
    kernel_->code.push_back(std::move(instruction));
  }

  void AddOperands(const std::string& text, int number, Instruction* instruction) {
    if (text[0] == '{') {
      for (const std::string& part : Split(text.substr(1, text.size() - 2), ",")) {
        AddOperands(part, number, instruction);
      }
      return;
    }
    Operand operand;
    // [map, {coordinates}]
    if (const size_t comma = text.find(','); text[0] == '[' && comma != std::string::npos) {
      AddOperands(text.substr(0, comma) + ']', number, instruction);
      AddOperands(Trimmed(text.substr(comma + 1, text.size() - comma - 2)), number, instruction);
      return;
    }
    if (text[0] == '[') {
      std::string base = Trimmed(text.substr(1, text.size() - 2));
      if (const size_t plus = base.find('+'); plus != std::string::npos) {
        operand.offset = std::atoll(Trimmed(base.substr(plus + 1)).c_str());
        base = Trimmed(base.substr(0, plus));
      }
      const int64_t offset = operand.offset;
      operand = Value(base, 8);
      operand.offset = offset;
    } else if (instruction->opcode.compare(0, 3, "bra") == 0) {
      branches_.push_back({kernel_->code.size(), text, {}});
      for (const Scope& scope : scopes_) branches_.back().scopes.push_back(scope.number);
      return;
    } else {
      operand = Value(text, SizeOfImmediate(instruction->opcode, number));
    }
    instruction->operands.push_back(operand);
  }

  // A register, a constant or an address. A register's slot is its number until all are placed.
  Operand Value(const std::string& text, int size) {
    Operand operand;
    if (text == "_") return operand;
    if (text[0] == '!') {
      operand = Value(text.substr(1), size);
      operand.negated = true;
      return operand;
    }
    if (const int number = FindRegister(text); number >= 0) {
      operand.slot = number;
      operand.size = static_cast<uint8_t>(registers_[number].size);
      return operand;
    }
    if (text[0] == '%') return Special(text);
    uint64_t value;
    if (StartsWith(text, "0f") || StartsWith(text, "0F") || StartsWith(text, "0d") ||
        StartsWith(text, "0D")) {
      value = std::strtoull(text.c_str() + 2, nullptr, 16);
    } else if (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') {
      value = text[0] == '-' ? static_cast<uint64_t>(std::strtoll(text.c_str(), nullptr, 0))
                             : std::strtoull(text.c_str(), nullptr, 0);
    } else {
      std::string name = text;
      int64_t offset = 0;
      if (const size_t plus = text.find('+'); plus != std::string::npos) {
        offset = std::atoll(text.c_str() + plus + 1);
        name = Trimmed(text.substr(0, plus));
      }
      const auto found = shared_.symbols.find(name);
      if (found == shared_.symbols.end()) Fail("unknown symbol " + text);
      value = static_cast<uint64_t>(offset) | kDynamic;
      if (!found->second.is_dynamic) value = static_cast<uint64_t>(found->second.offset + offset);
    }
    operand.is_constant = true;
    operand.size = static_cast<uint8_t>(size);
    operand.slot = Constant(value, size);
    return operand;
  }

  int Constant(uint64_t value, int size) {
    const auto [found, is_new] = constants_.try_emplace({value, size}, registers_.size());
    if (is_new) registers_.push_back({"", size});
    return static_cast<int>(found->second);
  }

  Operand Special(const std::string& name) {
    static const char* const kNames[] = {"%tid.",   "%ntid.",  "%ctaid.", "%nctaid.",
                                         "%laneid", "%warpid", "%envreg0"};
    bool is_known = false;
    for (const char* known : kNames) is_known |= StartsWith(name, known);
    if (!is_known) Fail("unknown register " + name);
    const auto [found, is_new] = specials_.try_emplace(name, registers_.size());
    if (is_new) registers_.push_back({"", 4});
    Operand operand;
    operand.slot = static_cast<int>(found->second);
    operand.size = 4;
    operand.is_constant = true;
    return operand;
  }

  void Finish() {
    // Dynamic shared memory follows the static one.
    kernel_->shared_bytes = (shared_.bytes + 1023) / 1024 * 1024;
    for (const Branch& branch : branches_) {
      int& target = kernel_->code[branch.instruction].target;
      for (const int scope : branch.scopes) {  // the innermost counts
        const auto found = labels_.find({scope, branch.label});
        if (found != labels_.end()) target = found->second;
      }
      if (target < 0) Fail("unknown label " + branch.label);
    }
    for (const auto& [key, number] : constants_) {
      uint64_t value = key.first;
      if ((value & kDynamicMask) == kDynamic) {
        value = (value & ~kDynamicMask) + static_cast<uint64_t>(kernel_->shared_bytes);
      }
      kernel_->constants.push_back(
          {static_cast<int32_t>(number), static_cast<uint8_t>(key.second), value});
    }
    for (const auto& [name, number] : specials_) kernel_->specials.emplace_back(number, name);
    PlaceRegisters(kernel_.get(), registers_);
  }

  // Marks the address of dynamic shared memory until the size of the static one is known.
  static constexpr uint64_t kDynamic = uint64_t{0x5d5d} << 48,
                            kDynamicMask = uint64_t{0xffff} << 48;

  const std::string& text_;
  const std::string& wanted_;
  size_t at_ = 0;
  int line_ = 1;
  int target_ = 0;
  uint32_t used_bytes_ = ~0u;  // by the next load
  Shared module_shared_, shared_;
  std::shared_ptr<Kernel> kernel_;
  std::vector<VirtualRegister> registers_;
  struct Scope {
    int number = 0;
    std::unordered_map<std::string, int> registers;
  };
  struct Branch {
    size_t instruction;
    std::string label;
    std::vector<int> scopes;  // that it is in
  };
  std::vector<Scope> scopes_;
  int num_scopes_ = 0;
  std::map<std::pair<uint64_t, int>, size_t> constants_;
  std::map<std::string, size_t> specials_;
  std::vector<Branch> branches_;
  std::map<std::pair<int, std::string>, int> labels_;  // by their scope
  std::string last_label_;
  std::map<std::string, std::vector<std::string>> tables_;  // of .branchtargets
};

}  // namespace

int SizeOfType(const std::string& type) {
  if (type == "pred") return 0;
  const size_t digit = type.find_first_of("0123456789");
  if (digit == std::string::npos) return 0;
  if (type.find("x2") != std::string::npos) return 4;
  return std::atoi(type.c_str() + digit) / 8;
}

std::shared_ptr<Kernel> Parse(const std::string& text, const std::string& name) {
  return Parser(text, name).Run();
}

}  // namespace emulated_gpu
