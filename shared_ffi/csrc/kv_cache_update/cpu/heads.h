// What the CPU does with the heads of a token before they are written: norms, the rotary embedding
// and the Walsh-Hadamard transform.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../norm.h"
#include "../params.h"
#include "../rotary.h"
#include "kernel.h"

namespace xla_gpu::kv_cache_update {

template <typename T>
void Widen(const void* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = ToFloat(static_cast<const T*>(from)[i]);
}

using Widener = void (*)(const void* from, int64_t count, float* to);

inline Widener WidenerOf(DType dtype) {
  return WithTensorType(dtype, [](auto type) -> Widener { return &Widen<decltype(type)>; });
}

// The norm of queries, of keys or of values. Calls without it do not use the object.
class HeadNorm {
 public:
  HeadNorm(const Params& p, bool is_used, const NormWeight& weight, int64_t num_heads,
           int64_t head_size)
      : kernel_(is_used ? &ChosenHeadsKernel() : nullptr),
        dtype_(p.dtype),
        rounds_first_(p.norms.rounds_first),
        head_size_(head_size),
        num_heads_together_(weight.is_over_heads ? num_heads : 1),
        eps_(p.norms.eps) {
    if (!is_used) return;
    weights_.resize(num_heads_together_ * head_size, 1.0f);
    if (weight.data != nullptr) {
      WidenerOf(weight.dtype)(weight.data, static_cast<int64_t>(weights_.size()), weights_.data());
    }
    if (weight.data != nullptr && p.norms.adds_one) {
      for (float& x : weights_) x = 1.0f + x;
    }
  }

  bool is_used() const { return kernel_ != nullptr; }

  // Before Normalize: the heads of the token, where they are normalized together.
  void Take(const void* heads) {
    if (num_heads_together_ > 1) inverse_ = InverseOf(heads);
  }

  // Writes a head of the token, normalized. It may be changed in place.
  void Normalize(const char* head, int64_t number, char* to) const {
    const bool is_alone = num_heads_together_ == 1;
    const float inverse = is_alone ? InverseOf(head) : inverse_;
    const float* weights = weights_.data() + (is_alone ? 0 : number * head_size_);
    kernel_->normalize(dtype_, head, weights, head_size_, inverse, rounds_first_, to);
  }

 private:
  float InverseOf(const void* heads) const {
    const int64_t count = num_heads_together_ * head_size_;
    return InverseRms(kernel_->sum_of_squares(dtype_, heads, count), count, eps_);
  }

  const HeadsKernel* const kernel_;  // null: there is no norm
  const DType dtype_;
  const bool rounds_first_;
  const int64_t head_size_;
  const int64_t num_heads_together_;
  const float eps_;
  std::vector<float> weights_;
  float inverse_ = 0.0f;
};

// The dtype of the rows of K or of V that are rounded to those of a cache.
inline DType RowDType(const Params& p, bool is_transformed, DType cache_dtype) {
  return is_transformed && IsQuantized(cache_dtype) ? DType::kFloat32 : p.dtype;
}

// Normalizes, rotates and transforms the heads of one token after another, as far as the call says
// so.
class Heads {
 public:
  explicit Heads(const Params& p)
      : p_(p),
        r_(p.rotary),
        is_rotated_(r_.cos_sin_cache != nullptr),
        query_norm_(p, p.norms.query.data != nullptr, p.norms.query, p.num_heads, p.head_size),
        key_norm_(p, p.norms.key.data != nullptr, p.norms.key, p.num_kv_heads, p.head_size),
        value_norm_(p, p.norms.has_values, {}, p.num_kv_heads, p.value_head_size) {
    const int64_t largest = std::max(p.head_size, p.value_head_size);
    const bool is_transformed = p.hadamard.IsUsed();
    if (is_rotated_ || p.norms.AreUsed() || is_transformed) {
      head_.resize(largest * SizeOf(p.dtype));
    }
    if (is_rotated_ || is_transformed) kernel_ = &ChosenHeadsKernel();
    if (is_transformed) numbers_.resize((largest + kMostLanes - 1) / kMostLanes * kMostLanes);
    if (!is_rotated_) return;
    cos_sin_.resize(r_.rotary_dim);
    widen_ = WidenerOf(r_.dtype);
  }

  // Changes the query of a token in place, if there is one. Without a row of cos_sin_cache it stays
  // as it is.
  void ChangeQuery(int64_t token) {
    if (p_.query == nullptr || !TakeRow(token)) return;
    const int64_t size = SizeOf(p_.dtype);
    char* head = static_cast<char*>(p_.query) + token * p_.query_stride * size;
    query_norm_.Take(head);
    for (int64_t i = 0; i < p_.num_heads; ++i, head += p_.head_size * size) {
      Change(query_norm_, head, i, head);
      if (!p_.hadamard.has_keys) continue;
      Transform(head, p_.head_size);
      kernel_->narrow(numbers_.data(), p_.head_size, p_.dtype, head);
    }
  }

  // Before Key: the token with a slot, and its keys.
  void TakeKeys(int64_t token, const void* keys) {
    TakeRow(token);
    key_norm_.Take(keys);
  }

  // The heads of the token as they are written, of RowDType. The next one takes its place.
  const char* Key(const char* head, int64_t number) {
    if (is_rotated_ || key_norm_.is_used()) {
      Change(key_norm_, head, number, head_.data());
      head = head_.data();
    }
    return p_.hadamard.has_keys ? Transformed(head, p_.head_size, p_.cache_dtype) : head;
  }
  const char* Value(const char* head) {
    if (value_norm_.is_used()) {
      value_norm_.Normalize(head, 0, head_.data());
      head = head_.data();
    }
    if (!p_.hadamard.has_values) return head;
    return Transformed(head, p_.value_head_size, p_.value_cache_dtype);
  }

 private:
  void Transform(const char* head, int64_t count) {
    kernel_->transform(p_.dtype, head, p_.hadamard.signs, count, numbers_.data());
  }

  const char* Transformed(const char* head, int64_t count, DType cache_dtype) {
    Transform(head, count);
    if (IsQuantized(cache_dtype)) return reinterpret_cast<const char*>(numbers_.data());
    kernel_->narrow(numbers_.data(), count, p_.dtype, head_.data());
    return head_.data();
  }

  // Reads the token's cosines and sines. False: it has none.
  bool TakeRow(int64_t token) {
    if (!is_rotated_ || token == token_) return true;
    const int64_t position = r_.positions.At(token);
    if (!r_.HasRow(position)) return false;
    const auto* table = static_cast<const char*>(r_.cos_sin_cache);
    widen_(table + position * r_.rotary_dim * SizeOf(r_.dtype), r_.rotary_dim, cos_sin_.data());
    token_ = token;
    return true;
  }

  void Change(const HeadNorm& norm, const char* head, int64_t number, char* to) const {
    const bool is_last = p_.norms.are_after_rotation;
    if (norm.is_used() && !is_last) {
      norm.Normalize(head, number, to);
      head = to;
    }
    if (is_rotated_) {
      const int64_t rotated_bytes = r_.rotary_dim * SizeOf(p_.dtype);
      const int64_t head_bytes = p_.head_size * SizeOf(p_.dtype);
      kernel_->rotate(p_.dtype, head, cos_sin_.data(), r_.rotary_dim / 2, r_.is_interleaved, to);
      if (head != to) {
        std::memcpy(to + rotated_bytes, head + rotated_bytes, head_bytes - rotated_bytes);
      }
      head = to;
    }
    if (norm.is_used() && is_last) norm.Normalize(head, number, to);
  }

  const Params& p_;
  const Rotary& r_;
  const bool is_rotated_;
  const HeadsKernel* kernel_ = nullptr;
  HeadNorm query_norm_;
  HeadNorm key_norm_;
  HeadNorm value_norm_;
  std::vector<float> cos_sin_;  // of token_
  std::vector<char> head_;
  std::vector<float> numbers_;  // a head after its transform
  int64_t token_ = -1;
  Widener widen_ = nullptr;
};

}  // namespace xla_gpu::kv_cache_update
