// Which kernels a call launches, in which order, and for which sequences. All of it follows from
// the call's sizes and from the kernels that there are for it: the lengths are on the device.
// run.cu launches what is planned.
#pragma once

#include "decode/numbers.h"

namespace xla_gpu::paged_attention {

enum class Step { kZeroArrivals, kDecode, kPortable, kPortablePrefill, kHopperPrefill, kCombine };

// The kernels that there are for a call.
struct KernelsOfCall {
  const decode::Numbers* decode;  // null: none
  int64_t rows;                   // of a work item of the portable kernel, which takes any query
  int64_t long_rows;              // of that for longer queries than one tile; 0: there is none
  bool is_hopper;                 // whether this one is that of Hopper GPUs
  bool launches_early;            // whether a kernel may begin before the one before it has ended
};

struct Launch {
  Step step;
  int64_t num_blocks;    // that have something to do: the GPU may hold fewer at once
  QueryLengths lengths;  // of the sequences that the kernel takes
  bool begins_early;     // before the kernel before it has ended
};

// The largest number of items for any lengths. It bounds the grid.
inline int64_t MaxItems(const Params& p, const Scratch& scratch, int64_t max_rows) {
  const int64_t group = p.group.number;
  const int64_t tokens_per_item = Larger(1, max_rows / group);
  if (p.max_seqs == 0) return 0;
  int64_t tiles = CeilDiv(p.num_tokens, tokens_per_item) + Smaller(p.max_seqs, p.num_tokens);
  if (p.max_query_len != 0) {
    const int64_t longest = Smaller(p.max_query_len, p.num_tokens);  // sums must not overflow
    tiles = Smaller(tiles, p.max_seqs * CeilDiv(longest, tokens_per_item));
  }
  return p.num_kv_heads * tiles * CeilDiv(group, max_rows) * scratch.max_splits;
}

class Plan {
 public:
  Plan(const Params& p, const Scratch& scratch, const KernelsOfCall& kernels) {
    const int64_t longest = p.max_query_len == 0 ? p.num_tokens : p.max_query_len;
    // The most tokens of a query that the decode kernel takes, and of one that is not long. On
    // Hopper, what the decode kernel leaves is long: fewer kernels are launched.
    const int64_t few = kernels.decode == nullptr ? 0 : FewTokens(p);
    const bool leaves_long = kernels.decode != nullptr && kernels.is_hopper;
    const int64_t most = leaves_long ? few : TokensPerTile(p);
    if (kernels.decode != nullptr) {
      const int64_t num_items = kernels.decode->MaxItems(p);
      if (kernels.decode->HasSplits() && num_items > 0) {
        const int64_t num_blocks = Larger(CeilDiv(p.max_seqs, decode::kSection),
                                          CeilDiv(NumArrivals(p, scratch), kZerosPerBlock));
        Add({Step::kZeroArrivals, num_blocks, {1, few}, kernels.launches_early});
      }
      Add({Step::kDecode, num_items, {1, few}, kernels.launches_early});
      ends_with_decode_ = num_items > 0 && longest <= few;
      if (ends_with_decode_) return;
    }
    const auto attend = [&](Step step, int64_t rows, QueryLengths lengths, bool begins_early) {
      if (lengths.min > Smaller(lengths.max, longest)) return;
      Add({step, Smaller(MaxItems(p, scratch, rows), scratch.num_slots), lengths, begins_early});
    };
    const int64_t most_of_rest = kernels.long_rows > 0 ? most : INT64_MAX;
    attend(Step::kPortable, kernels.rows, {few + 1, most_of_rest}, /*begins_early=*/false);
    // The kernel for long queries is never the first: the one before sets its counter to zero.
    if (kernels.long_rows > 0) {
      const Step step = kernels.is_hopper ? Step::kHopperPrefill : Step::kPortablePrefill;
      attend(step, kernels.long_rows, {most + 1}, kernels.launches_early);
    }
    const int64_t num_pieces = p.num_tokens * p.num_heads * PiecesOfHead(p);
    Add({Step::kCombine, CeilDiv(num_pieces, kWarps), {}, size_ > 0 && kernels.launches_early});
  }

  const Launch* begin() const { return launches_; }
  const Launch* end() const { return launches_ + size_; }

  // Whether the decode kernel computes all sequences.
  bool EndsWithDecode() const { return ends_with_decode_; }

 private:
  static constexpr int64_t kZerosPerBlock = 8192;  // written before the decode kernel has begun

  void Add(const Launch& launch) {
    if (launch.num_blocks > 0) launches_[size_++] = launch;
  }

  bool ends_with_decode_ = false;
  Launch launches_[5];
  int size_ = 0;
};

}  // namespace xla_gpu::paged_attention
