// The parts of the Python module shared_ffi._native besides the handlers (module.cc).
#pragma once

#include <nanobind/nanobind.h>

namespace xla_gpu {

// EagerCall, which calls a handler from Python.
void BindEagerCall(nanobind::module_& m);

// TorchRules, EagerKernel and Untraced, of which PyTorch's operators are made (torch/).
void BindTorchRules(nanobind::module_& m);
void BindEagerKernel(nanobind::module_& m);
void BindUntraced(nanobind::module_& m);

// Which kernels this build has, and which of them are used.
void BindKernels(nanobind::module_& m);

// What the checks of the ops in Python ask, so that each rule is written once.
void BindChecks(nanobind::module_& m);

}  // namespace xla_gpu
