// The choices that environment variables make for a process. No other file reads a variable.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace xla_gpu {

// One of several names, of which the first is the default. A variable may name another one. It is
// read once, by one rule with Python and without it: an empty one is not set, and a wrong one is an
// error() that the first call which needs the choice returns, and that fails the import in Python.
class Choice {
 public:
  // `what`, `where`: the words before and after the variable and the names in messages.
  Choice(const char* what, const char* variable, const char* where, std::vector<std::string> names);

  const std::vector<std::string>& names() const { return names_; }

  // What is wrong with the variable's value; empty: nothing.
  const std::string& error() const { return error_; }

  // The number of the chosen name: of the default where the variable is wrong.
  size_t index() const { return index_; }
  // "unknown" where the variable is wrong.
  std::string name() const { return error_.empty() ? names_[index_] : "unknown"; }

  // Chooses from now on. Returns what is wrong with the name; empty: nothing.
  std::string Choose(const std::string& name);

 private:
  const char *what_, *variable_, *where_;
  std::vector<std::string> names_;
  std::atomic<size_t> index_{0};
  std::string error_;
};

}  // namespace xla_gpu
