// Calls handlers on an emulated processor. Reads the calls from standard input and writes the
// results to standard output. tests/kernels/test_aarch64.py is the other side.
//
// Input: the number of calls. Each call has its target, its attributes and its arrays, operands
// first. A result in the place of an operand has the operand's number and no data.
// Output of each call: the error message, empty if there is none, and the data of the results.
// Integers are int64, and other attributes are double. A length precedes each string and array.
#include "ffi/handlers.h"

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "eager/runtime.h"
#include "ffi/dtypes.h"
#include "streams.h"

namespace {

std::string ReadString() {
  std::string x(Read<int64_t>(), '\0');
  ReadBytes(x.data(), x.size());
  return x;
}

struct Array {
  xla_gpu::EagerBuffer buffer;
  int64_t num_bytes;
};

Array ReadArray(const std::vector<Array>& others) {
  Array x = {{xla_gpu::DTypeNamed(ReadString()), nullptr, std::vector<int64_t>(Read<int64_t>())},
             0};
  for (int64_t& size : x.buffer.shape) size = Read<int64_t>();
  const auto operand = Read<int64_t>();
  x.num_bytes = Read<int64_t>();
  if (operand >= 0) {
    x.buffer.data = others.at(operand).buffer.data;
  } else {
    x.buffer.data = std::malloc(x.num_bytes + 1);
    ReadBytes(x.buffer.data, x.num_bytes);
  }
  return x;
}

void Call() {
  XLA_FFI_Handler* handler = xla_gpu_handler("cpu", ReadString().c_str());
  std::vector<std::pair<std::string, xla_gpu::Attribute>> attributes(Read<int64_t>());
  for (auto& [name, value] : attributes) {
    name = ReadString();
    if (Read<int64_t>() != 0) {
      value = static_cast<float>(Read<double>());
    } else {
      value = Read<int64_t>();
    }
  }
  const auto num_operands = Read<int64_t>(), num_results = Read<int64_t>();
  std::vector<Array> arrays;
  std::vector<xla_gpu::EagerBuffer> operands, results;
  for (int64_t i = 0; i < num_operands + num_results; ++i) {
    arrays.push_back(ReadArray(arrays));
    (i < num_operands ? operands : results).push_back(arrays.back().buffer);
  }
  const auto status = xla_gpu::EagerCall(handler, operands, results, attributes).Run({1, nullptr});
  const auto length = static_cast<int64_t>(status.message.size());
  WriteBytes(&length, sizeof(length));
  WriteBytes(status.message.data(), status.message.size());
  for (int64_t i = num_operands; i < num_operands + num_results; ++i) {
    WriteBytes(arrays[i].buffer.data, arrays[i].num_bytes);
  }
}

}  // namespace

int main() {
  for (auto count = Read<int64_t>(); count > 0; --count) Call();
}
