// Python functions that PyTorch's tracer stays out of.
//
// Dynamo, the tracer of torch.compile, follows a frame of Python wherever it comes from. So it also
// enters the kernels of an operator that runs eagerly: in a frame that it has given up, such as a
// loop around a print(). It has nothing to find there, and fails at Python that it does not know.
#pragma once

#include <nanobind/nanobind.h>

namespace xla_gpu {

// Calls a function. Dynamo traces neither it nor what it calls.
nanobind::object CallUntraced(nanobind::handle function, const nanobind::args& arguments,
                              const nanobind::kwargs& keywords = {});

}  // namespace xla_gpu
