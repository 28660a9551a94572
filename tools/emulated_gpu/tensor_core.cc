// Products of matrices: ldmatrix, mma.sync and wgmma.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine.h"
#include "tables.h"

namespace emulated_gpu {
namespace {

float FromHalf(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof(half));
  return static_cast<float>(half);
}

float FromBFloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

float Widen(uint16_t bits, bool is_bfloat16) {
  return is_bfloat16 ? FromBFloat16(bits) : FromHalf(bits);
}

// All lanes must be there: the products are the warp's.
bool AreAllHere(Warp& w) {
  if (w.alive != kAllLanes) Fail("an aligned instruction after lanes of the warp have ended");
  return w.active == kAllLanes;
}

// ldmatrix.sync.aligned.m8n8.xN[.trans].shared.b16 {d...}, [row]. number: transposed.
Outcome LoadMatrices(Warp& w, const Instruction& i) {
  if (!AreAllHere(w)) return Outcome::kBlocked;
  const Operand& address = i.At(1);
  uint16_t rows[kLanes][8];
  for (int row = 0; row < 8 * i.count; ++row) {
    w.block->lane = row;
    // Any lane may read what its warp wrote: the lanes meet here.
    uint64_t place = w.Address(address, row);
    if (place >= kSharedWindow) place -= kSharedWindow;
    std::memcpy(rows[row], w.block->shared.Read(w, row, place, 16), 16);
  }
  for (size_t m = 0; m < i.count; ++m) {
    uint32_t* d = w.Lanes<uint32_t>(i.operands[m]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      const auto& matrix = rows + 8 * m;
      const uint16_t low = i.number ? matrix[column][row] : matrix[row][column];
      const uint16_t high = i.number ? matrix[column + 1][row] : matrix[row][column + 1];
      d[lane] = low | static_cast<uint32_t>(high) << 16;
    }
  }
  return Outcome::kDone;
}

// stmatrix.sync.aligned.m8n8.xN[.trans].shared.b16 [row], {a...}
Outcome StoreMatrices(Warp& w, const Instruction& i) {
  if (!AreAllHere(w)) return Outcome::kBlocked;
  for (size_t m = 0; m < i.count; ++m) {
    const uint32_t* a = w.Lanes<uint32_t>(i.operands[1 + m]);
    for (int row = 0; row < 8; ++row) {
      uint16_t values[8];
      for (int column = 0; column < 8; ++column) {
        const int r = i.number ? column : row, c = i.number ? row : column;
        values[column] = static_cast<uint16_t>(a[r * 4 + c / 2] >> (16 * (c % 2)));
      }
      const int lane = static_cast<int>(8 * m) + row;
      w.block->lane = lane;
      uint64_t place = w.Address(i.At(0), lane);
      if (place >= kSharedWindow) place -= kSharedWindow;
      std::memcpy(w.block->shared.Write(w, lane, place, 16), values, 16);
    }
  }
  return Outcome::kDone;
}

// The lanes' parts of A, 16 x 16: registers of the rows of lane / 4 and 8 below, twice.
void SpreadA(const uint32_t* const (&registers)[4], bool is_bfloat16, float (&a)[16][16]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane / 4, column = lane % 4 * 2;
    for (int r = 0; r < 4; ++r) {
      const uint32_t pair = registers[r][lane];
      float* to = &a[row + r % 2 * 8][column + r / 2 * 8];
      to[0] = Widen(static_cast<uint16_t>(pair), is_bfloat16);
      to[1] = Widen(static_cast<uint16_t>(pair >> 16), is_bfloat16);
    }
  }
}

// How the tensor cores of a GPU add products of numbers of 16 bits: so many products and the sum
// so far at once. All are brought to the largest exponent among them and truncated to so many bits
// behind it. Their exact sum is truncated to float.
struct Adder {
  int terms, bits;
};
Adder AdderOf(int capability) { return capability < 90 ? Adder{8, 24} : Adder{16, 25}; }

// The exponent by which a number of 16 bits, or a float, is aligned: of numbers that are not
// normal, that of the type's smallest normal number. Two stand for what has none: sums with them
// are far from all others.
constexpr int kZero = -1000, kNotFinite = 100000;
int ExponentOf(float x, int lowest) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int field = static_cast<int>(bits >> 23 & 255);
  if (x == 0) return kZero;
  return field == 255 ? kNotFinite : std::max(field - 127, lowest);
}
constexpr int kLowestOfFloat = -126;  // of zero, too, as a term
int LowestOf(bool is_bfloat16) { return is_bfloat16 ? kLowestOfFloat : -14; }

float Truncate(double x) {
  const float nearest = static_cast<float>(x);
  const bool is_away = std::fabs(nearest) > std::fabs(x) && std::fabs(x) < 0x1p128;
  return is_away ? std::nextafter(nearest, 0.0f) : nearest;
}

// c + a[k] * b[k * stride] for any numbers.
float AddAny(const Adder& adder, int lowest, const float* a, const float* b, int stride, float c) {
  double plain = c;
  int top = std::max(ExponentOf(c, kLowestOfFloat), kLowestOfFloat);
  for (int k = 0; k < adder.terms; ++k) {
    plain += double{a[k]} * b[k * stride];
    top = std::max(top, ExponentOf(a[k], lowest) + ExponentOf(b[k * stride], lowest));
  }
  if (std::isinf(plain)) return static_cast<float>(plain);
  if (std::isnan(plain)) {
    constexpr uint32_t kNan = 0x7fffffff;
    std::memcpy(&c, &kNan, sizeof(c));
    return c;
  }
  const double scale = std::ldexp(1.0, adder.bits - top);
  double sum = 0;
  sum += std::trunc(c * scale);
  for (int k = 0; k < adder.terms; ++k) sum += std::trunc(double{a[k]} * b[k * stride] * scale);
  return Truncate(std::ldexp(sum, top - adder.bits));
}

// The same for eight adjacent columns, as fast as it can be: products of exponents in the middle of
// float's range are exact in float, and eight of them fit 32 bits.
using Ints = int32_t __attribute__((vector_size(32)));
using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(64)));
using Longs = int64_t __attribute__((vector_size(64)));

template <int kTerms, int kStride>
void AddToEight(const Adder& adder, int lowest, const float* a, const int* a_exponents,
                const float* b, const int* b_exponents, float* sums) {
  constexpr int kMiddle = 100;
  Floats c;
  std::memcpy(&c, sums, sizeof(c));
  Ints product_top = Ints{} + 2 * kZero;
#pragma GCC unroll 16
  for (int k = 0; k < kTerms; ++k) {
    Ints exponents;
    std::memcpy(&exponents, b_exponents + k * kStride, sizeof(exponents));
    exponents += a_exponents[k];
    product_top = exponents > product_top ? exponents : product_top;
  }
  Ints c_bits;
  std::memcpy(&c_bits, &c, sizeof(c));
  Ints c_top = (c_bits >> 23 & 255) - 127;
  Ints top = product_top > c_top ? product_top : c_top;
  // Products with zero leave the sum as it is.
  const Ints adds_nothing = (product_top < kZero / 2) & (c_top < 128);
  const Ints is_easy = ((top >= -kMiddle) & (top <= kMiddle)) | adds_nothing;
  int easy = -1;
  for (int n = 0; n < 8; ++n) easy &= is_easy[n];
  if (easy == 0) {
    for (int n = 0; n < 8; ++n) sums[n] = AddAny(adder, lowest, a, b + n, kStride, sums[n]);
    return;
  }
  top = adds_nothing ? Ints{} : top;
  const Ints scale_bits = (127 + adder.bits - top) << 23;
  const Ints inverse_bits = (127 - adder.bits + top) << 23;
  Floats scale, inverse;
  std::memcpy(&scale, &scale_bits, sizeof(scale));
  std::memcpy(&inverse, &inverse_bits, sizeof(inverse));
  const Floats scaled = c * scale;
  const Floats in_range = adds_nothing ? Floats{} : scaled;
  Doubles sum = __builtin_convertvector(__builtin_convertvector(in_range, Ints), Doubles);
#pragma GCC unroll 2
  for (int first = 0; first < kTerms; first += 8) {
    Ints eight = {};
#pragma GCC unroll 8
    for (int k = first; k < first + 8; ++k) {
      Floats factors;
      std::memcpy(&factors, b + k * kStride, sizeof(factors));
      eight += __builtin_convertvector(factors * a[k] * scale, Ints);
    }
    sum += __builtin_convertvector(eight, Doubles);
  }
  Floats nearest = __builtin_convertvector(sum, Floats);
  const Doubles wide = __builtin_convertvector(nearest, Doubles);
  const Longs is_away = ((sum > 0) & (wide > sum)) | ((sum < 0) & (wide < sum));
  Ints nearest_bits;
  std::memcpy(&nearest_bits, &nearest, sizeof(nearest));
  nearest_bits += __builtin_convertvector(is_away, Ints);  // -1: towards zero
  std::memcpy(&nearest, &nearest_bits, sizeof(nearest));
  const Floats result = adds_nothing ? c + 0.0f : nearest * inverse;
  std::memcpy(sums, &result, sizeof(result));
}

// sums[16][columns] += a * b
template <int kColumns>
void AddProducts(float (*sums)[kColumns], const float (&a)[16][16], const float (*b)[kColumns],
                 int columns, bool is_bfloat16) {
  const Adder adder = AdderOf(Capability());
  const int lowest = LowestOf(is_bfloat16);
  int b_exponents[16][kColumns];
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < columns; ++n) b_exponents[k][n] = ExponentOf(b[k][n], lowest);
  }
  for (int row = 0; row < 16; ++row) {
    int a_exponents[16];
    for (int k = 0; k < 16; ++k) a_exponents[k] = ExponentOf(a[row][k], lowest);
    for (int n = 0; n < columns; n += 8) {
      const auto add = [&](auto terms, int k) {
        AddToEight<terms, kColumns>(adder, lowest, a[row] + k, a_exponents + k, b[k] + n,
                                    b_exponents[k] + n, sums[row] + n);
      };
      if (adder.terms == 16) {
        add(std::integral_constant<int, 16>(), 0);
      } else {
        add(std::integral_constant<int, 8>(), 0);
        add(std::integral_constant<int, 8>(), 8);
      }
    }
  }
}

// mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32 d, a, b, c. number: 1 for bfloat16.
Outcome MultiplyAdd(Warp& w, const Instruction& i) {
  if (!AreAllHere(w)) return Outcome::kBlocked;
  const bool is_bfloat16 = i.number == 1;
  const uint32_t* registers[4];
  for (size_t r = 0; r < 4; ++r) registers[r] = w.Lanes<uint32_t>(i.operands[4 + r]);
  float a[16][16], b[16][8], sums[16][8];
  SpreadA(registers, is_bfloat16, a);
  for (size_t r = 0; r < 2; ++r) {
    const uint32_t* from = w.Lanes<uint32_t>(i.operands[8 + r]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int k = lane % 4 * 2 + static_cast<int>(r) * 8;
      b[k][lane / 4] = Widen(static_cast<uint16_t>(from[lane]), is_bfloat16);
      b[k + 1][lane / 4] = Widen(static_cast<uint16_t>(from[lane] >> 16), is_bfloat16);
    }
  }
  for (size_t r = 0; r < 4; ++r) {
    const float* c = w.Lanes<float>(i.operands[10 + r]);
    for (int lane = 0; lane < kLanes; ++lane)
      sums[lane / 4 + static_cast<int>(r) / 2 * 8][lane % 4 * 2 + static_cast<int>(r) % 2] =
          c[lane];
  }
  AddProducts<8>(sums, a, b, 8, is_bfloat16);
  for (size_t r = 0; r < 4; ++r) {
    float* d = w.Lanes<float>(i.operands[r]);
    for (int lane = 0; lane < kLanes; ++lane)
      d[lane] =
          sums[lane / 4 + static_cast<int>(r) / 2 * 8][lane % 4 * 2 + static_cast<int>(r) % 2];
  }
  return Outcome::kDone;
}

// A matrix in shared memory, as a descriptor of wgmma says. Swizzled in rows of 128, 64 or 32
// bytes.
class Matrix {
 public:
  Matrix(uint64_t descriptor, bool is_k_major) : is_k_major_(is_k_major) {
    start_ = (descriptor & 0x3fff) << 4;
    leading_ = (descriptor >> 16 & 0x3fff) << 4;
    stride_ = (descriptor >> 32 & 0x3fff) << 4;
    if ((descriptor >> 49 & 7) != 0) Fail("a wgmma descriptor with a base offset");
    switch (descriptor >> 62) {
      case 1:
        row_ = 128;
        break;
      case 2:
        row_ = 64;
        break;
      case 3:
        row_ = 32;
        break;
      default:
        Fail("a wgmma descriptor without a swizzle");
    }
    if (stride_ % (8 * row_) != 0 && stride_ != 0)
      Fail("a wgmma descriptor whose stride is no multiple of its swizzle");
  }

  // The address of element k of row or column `mn`; elements of 16 bits.
  uint64_t At(uint64_t mn, uint64_t k) const {
    uint64_t address = start_;
    const uint64_t elements = row_ / 2;
    if (is_k_major_) {  // rows of K: 8 of them are an atom
      address += mn / 8 * stride_ + mn % 8 * row_ + k * 2;
    } else {  // rows of MN: 8 of K are an atom
      address += mn / elements * leading_ + k / 8 * stride_ + k % 8 * row_ + mn % elements * 2;
    }
    return Swizzled(address, row_);
  }

 private:
  bool is_k_major_;
  uint64_t start_, leading_, stride_, row_;
};

size_t Unit(const Operand& operand) { return static_cast<size_t>(operand.slot) / 64; }

// Until the wait, nobody may touch the sums, nor write A if it is in registers.
void MarkBusy(Warp& w, const Instruction& i, bool begins) {
  const size_t num_sums = static_cast<size_t>(i.first[1]);
  const size_t end = num_sums + (i.first[2] - i.first[1] == 4 ? 4 : 0);
  for (size_t k = 0; k < end; ++k) {
    if (i.operands[k].slot < 0 || i.operands[k].is_constant) continue;
    const uint32_t change = k < num_sums ? kSum : 1;
    w.busy[Unit(i.operands[k])] += begins ? change : -change;
  }
}

// Computes the warp's 16 rows of a product.
void Compute(Warp& w, const Product& product) {
  const Instruction& i = *product.instruction;
  w.block->instruction = &i;
  const bool is_bfloat16 = i.number == 1;
  const int columns = i.count * 8;
  float a[16][16], b[16][256], sums[16][256];
  const auto element = [&](const Matrix& matrix, uint64_t mn, uint64_t k) {
    uint16_t bits;
    std::memcpy(&bits, w.block->shared.bytes() + matrix.At(mn, k), 2);
    return Widen(bits, is_bfloat16);
  };
  // The accesses are checked 16 bytes at a time: 8 elements along the rows lie together.
  const auto check = [&](const Matrix& matrix, bool is_mn_major, int begin, int end) {
    for (int mn = begin; mn < end; mn += is_mn_major ? 8 : 1) {
      for (int k = 0; k < 16; k += is_mn_major ? 1 : 8) {
        w.block->shared.ReadAsync(
            w, product.began,
            matrix.At(static_cast<uint64_t>(mn), static_cast<uint64_t>(k)) & ~uint64_t{15}, 16);
      }
    }
  };
  if (product.a.empty()) {
    const Matrix matrix(product.a_descriptor, !product.a_is_mn_major);
    const int first = w.number % 4 * 16;
    check(matrix, product.a_is_mn_major, first, first + 16);
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k)
        a[row][k] = element(matrix, static_cast<uint64_t>(first + row), static_cast<uint64_t>(k));
    }
  } else {
    const uint32_t* registers[4];
    for (size_t r = 0; r < 4; ++r) registers[r] = product.a.data() + r * kLanes;
    SpreadA(registers, is_bfloat16, a);
  }
  const Matrix matrix(product.b_descriptor, !product.b_is_mn_major);
  check(matrix, product.b_is_mn_major, 0, columns);
  for (int n = 0; n < columns; ++n) {
    for (int k = 0; k < 16; ++k)
      b[k][n] = element(matrix, static_cast<uint64_t>(n), static_cast<uint64_t>(k));
  }
  // Lane l has rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and the next one of each 8.
  const auto place = [&](int r, int lane) -> float& {
    return sums[lane / 4 + r / 2 % 2 * 8][r / 4 * 8 + lane % 4 * 2 + r % 2];
  };
  for (int r = 0; r < columns / 2; ++r) {
    const float* d = w.Lanes<float>(i.operands[static_cast<size_t>(r)]);
    for (int lane = 0; lane < kLanes; ++lane) place(r, lane) = product.accumulates ? d[lane] : 0;
  }
  AddProducts<256>(sums, a, b, columns, is_bfloat16);
  for (int r = 0; r < columns / 2; ++r) {
    float* d = w.Lanes<float>(i.operands[static_cast<size_t>(r)]);
    for (int lane = 0; lane < kLanes; ++lane) d[lane] = place(r, lane);
  }
  MarkBusy(w, i, false);
  --w.products_in_flight;
}

// wgmma.mma_async d, a or [a], b, scale_d, scale_a, scale_b[, trans_a], trans_b
Outcome StartProduct(Warp& w, const Instruction& i) {
  if (!AreAllHere(w)) return Outcome::kBlocked;
  Product product{};
  product.instruction = &i;
  product.began = w.seen;
  const bool has_registers = i.first[2] - i.first[1] == 4;
  const size_t num_sums = static_cast<size_t>(i.first[1]);
  for (size_t k = 0; k < num_sums + (has_registers ? 4 : 0); ++k) {
    const Operand& operand = i.operands[k];
    if (operand.is_constant) continue;
    if (w.register_steps[Unit(operand)] == w.fences)
      Fail("wgmma uses a register that was written after the last wgmma.fence");
    if (k >= num_sums && w.busy[Unit(operand)] >= kSum)
      Fail("wgmma reads a register of a product that was not waited for");
  }
  if (has_registers) {
    product.a.resize(4 * kLanes);
    for (size_t r = 0; r < 4; ++r)
      std::memcpy(product.a.data() + r * kLanes, w.Lanes<uint32_t>(i.operands[num_sums + r]),
                  4 * kLanes);
  } else {
    product.a_descriptor = w.Lanes<uint64_t>(i, 1)[0];
  }
  product.b_descriptor = w.Lanes<uint64_t>(i, 2)[0];
  const uint32_t accumulates = w.PredicateValue(i.At(3));
  if (accumulates != 0 && accumulates != kAllLanes)
    Fail("lanes disagree on whether wgmma accumulates");
  product.accumulates = accumulates != 0;
  const auto constant = [&](int operand) {
    return static_cast<int32_t>(w.Integer(i.At(operand), 0));
  };
  if (constant(4) != 1 || constant(5) != 1) Fail("wgmma with a negated operand");
  product.a_is_mn_major = !has_registers && constant(6) == 1;
  product.b_is_mn_major = constant(has_registers ? 6 : 7) == 1;
  MarkBusy(w, i, true);
  ++w.products_in_flight;
  w.product_groups.back().push_back(std::move(product));
  w.Step();
  return Outcome::kDone;
}

Outcome FenceProducts(Warp& w, const Instruction&) {
  if (!AreAllHere(w)) return Outcome::kBlocked;
  ++w.fences;
  return Outcome::kDone;
}

Outcome CommitProducts(Warp& w, const Instruction&) {
  if (!AreAllHere(w)) return Outcome::kBlocked;
  w.product_groups.emplace_back();
  return Outcome::kDone;
}

// The products are computed now, as late as they may be.
Outcome WaitForProducts(Warp& w, const Instruction& i) {
  if (!AreAllHere(w)) return Outcome::kBlocked;
  const size_t pending = w.Integer(i.At(0), 0);
  const size_t committed = w.product_groups.size() - 1;
  if (committed <= pending) return Outcome::kDone;
  const long num_groups = static_cast<long>(committed - pending);
  for (long g = 0; g < num_groups; ++g) {
    for (const Product& product : w.product_groups[static_cast<size_t>(g)]) Compute(w, product);
  }
  w.product_groups.erase(w.product_groups.begin(), w.product_groups.begin() + num_groups);
  return Outcome::kDone;
}

bool Has(const Words& words, const char* word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

bool DecodeTensorCore(const Words& words, Instruction* i) {
  const std::string& name = words[0];
  i->is_collective = true;
  if (name == "ldmatrix" || name == "stmatrix") {
    i->execute = name == "ldmatrix" ? LoadMatrices : StoreMatrices;
    i->count = Has(words, "x4") ? 4 : Has(words, "x2") ? 2 : 1;
    i->number = Has(words, "trans");
    return Has(words, "m8n8") && words.back() == "b16";
  }
  if (name == "mma") {
    i->execute = MultiplyAdd;
    i->number = Has(words, "bf16");
    return Has(words, "m16n8k16") && words.back() == "f32" &&
           (Has(words, "bf16") || Has(words, "f16"));
  }
  if (name == "wgmma") {
    i->is_wgmma = true;
    if (words[1] == "fence")
      i->execute = FenceProducts;
    else if (words[1] == "commit_group")
      i->execute = CommitProducts;
    else if (words[1] == "wait_group")
      i->execute = WaitForProducts;
    else if (words[1] == "mma_async") {
      // m64nNk16
      const std::string& shape = words[4];
      if (shape.substr(0, 4) != "m64n" || shape.substr(shape.size() - 3) != "k16") return false;
      i->count = static_cast<uint8_t>(std::atoi(shape.c_str() + 4) / 8);
      i->number = Has(words, "bf16");
      i->execute = StartProduct;
      return words[5] == "f32" && (Has(words, "bf16") || Has(words, "f16"));
    } else
      return false;
    return true;
  }
  return false;
}

}  // namespace emulated_gpu
