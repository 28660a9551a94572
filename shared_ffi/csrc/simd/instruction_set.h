// Includes the file of the instruction set that is compiled for.
#pragma once

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#elif defined(__aarch64__)
#include "neon.h"
#else
#include "portable.h"
namespace xla_gpu {
namespace {
using namespace portable;
}
}  // namespace xla_gpu
#endif
