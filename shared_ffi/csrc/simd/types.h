// The vector types: as wide as a register of the instruction set that is compiled for.
#pragma once

#include <cstdint>

#include "../storage.h"

namespace xla_gpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// A vector register of float, and of the same bits as integers.
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * kLanes)));
typedef int16_t SignedHalfWords __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

// As many bytes as an instruction looks up in a table of 16.
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint64_t WordPair __attribute__((vector_size(16)));

// A dot product is the sum of kChains chains of multiply-adds. With AVX-512 a register has room for
// the chains of two: adding up 16 chains would take an eighth to a quarter of the time.
constexpr int kChains = kLanes < 8 ? kLanes : 8;
constexpr int kRowsPerVector = kLanes / kChains;

// The block of sums that fits the register file beside what it is computed from: 16 of 32 registers
// with AVX-512 and NEON, 12 of 16 elsewhere.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockRows = 4, kBlockVectors = 4;
#else
constexpr int kBlockRows = 6, kBlockVectors = 2;
#endif

}  // namespace
}  // namespace xla_gpu
