// Which positions a row of a work item attends to, and what ALiBi adds to its logits.
#pragma once

#include "item.cuh"

namespace xla_gpu::paged_attention {

// The positions [begin, end) of a work item that one of its rows attends to, but for its RowHoles.
struct RowRange {
  int32_t begin;
  int32_t end;

  RowRange() = default;
  __device__ RowRange(const Params& p, const Item& item, int64_t row) : begin(0), end(0) {
    if (row >= item.num_rows) return;
    *this = OfToken(p, item, TokenOf(p, item, row));
  }

  // The range of the sequence's token i.
  static __device__ RowRange OfToken(const Params& p, const Item& item, int64_t i) {
    const Span span = p.Attended(item.Tokens(), i);
    RowRange range;
    range.begin = static_cast<int32_t>(Larger(item.begin, span.begin));
    range.end = static_cast<int32_t>(Smaller(item.end, span.end));
    return range;
  }

  __device__ bool Contains(int32_t position) const { return begin <= position && position < end; }
};

// What a row leaves out of its range. It is found where it is needed: few calls have holes.
struct RowHoles : Holes {
  __device__ RowHoles(const Params& p, const Item& item, int64_t row) : Holes{} {
    if (row >= item.num_rows) return;
    static_cast<Holes&>(*this) = p.HolesOf(item.Tokens(), RowPlace(p, item, row).token);
  }
};

// Whether a work item's rows from `thread` on, one for each of kThreads, have a tree mask that is
// not legal.
__device__ inline bool HasBadTree(const Params& p, const Item& item, int thread) {
  if (p.tree_mask == nullptr) return false;
  const int64_t q_len = item.context_len - item.first_position;
  bool is_bad = false;
  for (int row = thread; row < item.num_rows; row += kThreads) {
    const int64_t token = item.first_token + RowPlace(p, item, row).token;
    is_bad = is_bad || !Params::TreeIsLegal(p.TreeBits(token), q_len);
  }
  return is_bad;
}

// Positions [begin, end) of a work item that all of its rows attend to: those of their windows.
struct CommonRange {
  int32_t begin;
  int32_t end;

  CommonRange() = default;
  __device__ CommonRange(const Params& p, const Item& item)
      : CommonRange(p, item, FirstPosition(p, item), LastPosition(p, item)) {}

  // The same, given the positions of its first and of its last row.
  __device__ CommonRange(const Params& p, const Item& item, int64_t first, int64_t last)
      : begin(static_cast<int32_t>(Larger(item.begin, p.WindowBegin(last)))),
        end(static_cast<int32_t>(Smaller(item.end, p.WindowEnd(item.Tokens(), first)))) {
    if (!p.MayBeTree(item.context_len - item.first_position)) return;
    begin = max(begin, static_cast<int32_t>(p.WindowBegin(item.context_len - 1)));
    end = min(end, item.first_position);
  }

  // Whether some rows attend to positions in [from, to) that other rows do not attend to.
  __device__ bool RowsDiffer(const Item& item, int32_t from, int32_t to) const {
    return begin > max(item.begin, from) || end < min(item.end, to);
  }
  __device__ bool Contains(int32_t from, int32_t to) const { return begin <= from && to <= end; }
};

// The bias that ALiBi adds to a row's logits, in units of 1 / log2(e).
class AlibiBias {
 public:
  __device__ AlibiBias(const Params& p, const Item& item, int64_t row) : slope_(0), position_(0) {
    if (row >= item.num_rows) return;
    const RowPlace place(p, item, row);
    slope_ = p.AlibiSlope(place.head);
    position_ = static_cast<int32_t>(item.first_position + place.token);
  }

  __device__ float AddTo(float logit, int32_t position) const {
    return gpu::Fma(-slope_, fabsf(static_cast<float>(position_ - position)), logit);
  }

 private:
  float slope_;
  int32_t position_;  // of the row's query token
};

}  // namespace xla_gpu::paged_attention
