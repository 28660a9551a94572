// A handler that Python calls directly, with no XLA runtime.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "eager/runtime.h"
#include "ffi/handlers.h"

namespace xla_gpu {

// A handler with its attributes and the specs of its arrays.
class EagerCall {
 public:
  // A float attribute is passed on as float32, an int as int64.
  EagerCall(const std::string& platform, const std::string& target, nanobind::dict attributes,
            nanobind::sequence operands, nanobind::sequence results);

  // One address for each operand, then one for each result. Throws what Python is to raise.
  void Run(const std::vector<void*>& addresses, const EagerContext& context) const;

  size_t num_operands() const { return call_.num_operands(); }
  size_t num_results() const { return call_.num_results(); }

 private:
  const NamedHandler& handler_;
  PreparedCall call_;
};

}  // namespace xla_gpu
