// What the CPU kernels ask of a processor's vector unit. A kernel that includes this is compiled
// once for each instruction set (see cmake/cpu.cmake). Everything in this folder and in such a
// kernel has internal linkage: the linker must not give one instruction set's copy of a function to
// another.
//
//   types.h      the vector types, and the block of sums that fits the registers
//   avx512.h, avx2.h, neon.h, portable.h, chosen by lanes.h
//                the operations that differ: one file for each instruction set
//   lanes.h      loads, stores, shuffles, sums over lanes
//   convert.h    storage types to float and back
//   dot.h        sums of products of numbers in storage
//   dot_bf16.h   the same with AVX-512's bfloat16 products
//   math.h       exp2, tanh, the soft cap
#pragma once

#include "convert.h"
#include "dot.h"
#include "lanes.h"
#include "math.h"
#ifdef __AVX512BF16__
#include "dot_bf16.h"
#endif
