// A handler that Python calls directly, with no XLA runtime.
#pragma once

#include <nanobind/nanobind.h>

#include <memory_resource>
#include <vector>

#include "eager/runtime.h"

namespace xla_gpu {

// The name that jax.ffi expects of a capsule with a handler.
inline constexpr char kHandlerCapsule[] = "xla._CUSTOM_CALL_TARGET";

// A handler (a capsule of handlers()) with its attributes and the ArraySpecs of its arrays. A float
// attribute is passed on as float32, an int as int64.
EagerCall MakeEagerCall(nanobind::capsule handler, nanobind::dict attributes,
                        nanobind::sequence operands, nanobind::sequence results);

// One address for each operand, then one for each result. Throws what Python is to raise.
void RunOrRaise(const EagerCall& call, const std::pmr::vector<void*>& addresses,
                const EagerContext& context);

}  // namespace xla_gpu
