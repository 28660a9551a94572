// Multiply-adds of registers alone, on the calling thread: no program multiplies faster.
// limits.py compiles this file for the processor that it runs on.
#include <cstdint>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

// Two begin in a cycle, and each takes 4 to 6. AVX2 has 16 registers, the others 32.
#if defined __AVX512F__
constexpr int kVectorBytes = 64, kChains = 24;
#elif defined __AVX2__
constexpr int kVectorBytes = 32, kChains = 12;
#else
constexpr int kVectorBytes = 16, kChains = 24;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));

volatile float memory;  // for all the compiler knows, the chains begin differently and are needed

// Computes about `flops`, of which a call of `multiply_add` computes `flops_each`.
template <typename MultiplyAdd>
void Repeat(int64_t flops, int64_t flops_each, const MultiplyAdd& multiply_add) {
  Floats sums[kChains];
#pragma GCC unroll 32  // so that all sums are in registers
  for (int i = 0; i < kChains; ++i) sums[i] = Floats{} + memory;
  for (int64_t done = 0; done < flops; done += kChains * flops_each) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sums[i] = multiply_add(sums[i]);
  }
  Floats sum = sums[0];
#pragma GCC unroll 32
  for (int i = 1; i < kChains; ++i) sum += sums[i];
  memory = sum[0];
}

}  // namespace

extern "C" void MultiplyFloat32(int64_t flops) {
  const Floats half = Floats{} + 0.5f, one = Floats{} + 1.0f;
  Repeat(flops, 2 * kVectorBytes / 4, [&](Floats sums) { return sums * half + one; });
}

#ifdef __AVX512BF16__
extern "C" void MultiplyBFloat16(int64_t flops) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  Repeat(flops, 2 * kVectorBytes / 2,
         [&](Floats sums) { return (Floats)_mm512_dpbf16_ps((__m512)sums, ones, ones); });
}
#endif
