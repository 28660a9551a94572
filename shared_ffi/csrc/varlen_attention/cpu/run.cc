#include "run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace xla_gpu::varlen_attention {
namespace {

using paged_attention::kLog2E;
using paged_attention::Params;
using paged_attention::QueryTokens;
using paged_attention::Span;

template <typename T>
std::vector<double> Row(const void* array, int64_t offset, int64_t size) {
  std::vector<double> row(size);
  for (int64_t i = 0; i < size; ++i) row[i] = ToFloat(static_cast<const T*>(array)[offset + i]);
  return row;
}

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void AddTo(std::vector<double>* sums, int64_t row, double factor, const std::vector<double>& x) {
  for (size_t i = 0; i < x.size(); ++i) (*sums)[row * x.size() + i] += factor * x[i];
}

// The gradients of a sequence and a query head's kv head.
template <typename T>
void Differentiate(const BackwardParams& b, int64_t sequence, int64_t kv_head, double* dsinks,
                   double* dslopes) {
  const Params& p = b.forward;
  const QueryTokens tokens = p.QueryTokensOf(sequence);
  const int64_t q_len = tokens.Count(), group = p.group.number;
  std::vector<double> dk(q_len * p.head_size), dv(q_len * p.value_head_size);
  const auto write = [](void* to, int64_t offset, double scale, const double* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      FromFloat(static_cast<float>(from[i] * scale), static_cast<T*>(to) + offset + i);
    }
  };
  for (int64_t i = 0; i < q_len; ++i) {
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const int64_t token = tokens.first + i, row = token * p.num_heads + head;
      const auto q = Row<T>(p.query, p.QueryOffset(token, head), p.head_size);
      const int64_t offset = head * p.value_head_size;
      const auto out = Row<T>(b.output, token * b.output_stride + offset, p.value_head_size);
      const auto dout = Row<T>(b.dout, token * b.dout_stride + offset, p.value_head_size);
      const double delta = Dot(out, dout), lse = b.lse[row];
      std::vector<double> dq(p.head_size);
      const Span span = p.Attended(tokens, i);
      const auto holes = p.HolesOf(tokens, i);
      for (int64_t j = span.begin; j < span.end && lse != -INFINITY; ++j) {
        if (holes.Contain(static_cast<int32_t>(j))) continue;
        const int64_t at = p.cache.Offset(tokens.first + j, 0);
        const auto k = Row<T>(p.cache.keys, at + kv_head * p.cache.head_stride, p.head_size);
        const auto v = Row<T>(p.cache.values,
                              p.cache.OffsetOfValue(at) + kv_head * p.cache.value_head_stride,
                              p.value_head_size);
        double y = p.scale * Dot(q, k), dcap = 1;
        if (p.soft_cap > 0) {
          const double tanh = std::tanh(y / p.soft_cap);
          y = p.soft_cap * tanh;
          dcap = 1 - tanh * tanh;
        }
        const double distance = std::abs(i - j);
        if (p.alibi_slopes != nullptr) y -= p.AlibiSlope(head) / double{kLog2E} * distance;
        const double weight = std::exp(std::min(y - lse, 0.0));
        const double ds = weight * (Dot(dout, v) - delta);
        if (b.dalibi_slopes != nullptr) dslopes[head] -= ds * distance;
        AddTo(&dq, 0, ds * dcap, k);
        AddTo(&dk, j, ds * dcap, q);
        AddTo(&dv, j, weight, dout);
      }
      write(b.dquery, row * p.head_size, p.scale, dq.data(), p.head_size);
      if (b.dsinks != nullptr && delta != 0) dsinks[head] -= std::exp(p.sinks[head] - lse) * delta;
    }
  }
  for (int64_t j = 0; j < q_len; ++j) {
    const int64_t row = (tokens.first + j) * p.num_kv_heads + kv_head;
    write(b.dkey, row * p.head_size, p.scale, &dk[j * p.head_size], p.head_size);
    write(b.dvalue, row * p.value_head_size, 1, &dv[j * p.value_head_size], p.value_head_size);
  }
}

}  // namespace

void RunBackwardOnCpu(const BackwardParams& b, const Executor& executor) {
  const Params& p = b.forward;
  const int64_t num_seqs = *p.num_seqs, tokens = p.num_tokens, size = SizeOf(p.dtype);
  std::memset(b.dquery, 0, tokens * p.num_heads * p.head_size * size);
  std::memset(b.dkey, 0, tokens * p.num_kv_heads * p.head_size * size);
  std::memset(b.dvalue, 0, tokens * p.num_kv_heads * p.value_head_size * size);
  std::vector<double> dsinks(num_seqs * p.num_heads), dslopes(num_seqs * p.num_heads);
  ParallelFor(executor, num_seqs * p.num_kv_heads, [&](int64_t i) {
    const int64_t sequence = i / p.num_kv_heads, first = sequence * p.num_heads;
    WithTensorType(p.dtype, [&](auto type) {
      Differentiate<decltype(type)>(b, sequence, i % p.num_kv_heads, &dsinks[first],
                                    &dslopes[first]);
    });
  });
  for (const auto& [to, sums] : {std::pair(b.dsinks, &dsinks), {b.dalibi_slopes, &dslopes}}) {
    for (int64_t head = 0; to != nullptr && head < p.num_heads; ++head) {
      double sum = 0;
      for (int64_t s = 0; s < num_seqs; ++s) sum += (*sums)[s * p.num_heads + head];
      to[head] = static_cast<float>(sum);
    }
  }
}

}  // namespace xla_gpu::varlen_attention
