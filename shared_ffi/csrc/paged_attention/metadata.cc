#include "metadata.h"

#include <algorithm>
#include <vector>

#include "../str_cat.h"

namespace xla_gpu::paged_attention {
namespace {

// The entries of the page table that the queries of a sequence need: all from the first position
// that some query attends to.
struct NeededBlocks {
  int64_t first;
  int64_t last;

  NeededBlocks(const Params& p, const QueryTokens& tokens) {
    int64_t begin = p.WindowBegin(tokens.first_position);
    for (int64_t i = 0; p.HasRanges() && i < tokens.Count(); ++i) {
      const Span range = p.RangeOf(tokens, i);
      if (!range.IsEmpty()) begin = Smaller(begin, range.begin);
    }
    first = begin / p.block_size;
    last = (tokens.context_len - 1) / p.block_size;
  }
};

// What to do about entries of query_start_loc.
constexpr char kRunningSums[] = ". It has 0, then the running sums of the sequences' query lengths";

}  // namespace

std::string MetadataError(const Params& p) {
  const int64_t num_seqs = *p.num_seqs;
  if (num_seqs < 0 || num_seqs > p.max_seqs) {
    return StrCat("num_seqs must be from 0 to max_seqs=", p.max_seqs, "; got ", num_seqs,
                  ". Pass how many sequences there are, and arrays with room for them");
  }
  if (num_seqs > 0 && p.query_start_loc[0] < 0) {
    return StrCat("query_start_loc[0] must be at least 0; got ", p.query_start_loc[0],
                  kRunningSums);
  }
  const int64_t capacity = p.Capacity();
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t start = p.query_start_loc[s], end = p.query_start_loc[s + 1];
    const int64_t q_len = end - start, context_len = p.ContextLen(s);
    if (q_len < 0) {
      return StrCat("query_start_loc must not decrease; got query_start_loc[", s + 1, "]=", end,
                    " after query_start_loc[", s, "]=", start, kRunningSums);
    }
    if (end > p.num_tokens) {
      return StrCat("query_start_loc[", s + 1, "] must be at most num_tokens=", p.num_tokens,
                    "; got ", end, kRunningSums);
    }
    if (p.max_query_len != 0 && q_len > p.max_query_len) {
      return StrCat("query_start_loc must give sequence ", s,
                    " at most max_query_len=", p.max_query_len, " tokens; got ", q_len,
                    ". Raise max_query_len, or leave it out");
    }
    if (p.prefix_seqs != nullptr && (p.prefix_seqs[s] < -1 || p.prefix_seqs[s] >= s)) {
      return StrCat("prefix_seqs[", s, "] must be -1, or the number of an earlier sequence; got ",
                    p.prefix_seqs[s]);
    }
    if (context_len < 0 || context_len > capacity) {
      const bool is_of_table = capacity < kMaxContextLen;
      const std::string limit = is_of_table ? StrCat("max_blocks_per_seq=", p.max_blocks_per_seq,
                                                     " * block_size=", p.block_size)
                                            : StrCat(capacity);
      const char* remedy = is_of_table && context_len > capacity
                               ? ", or give block_tables more columns; or, if kv_cache has blocks "
                                 "of another size, name its dimensions in kv_layout"
                               : "";
      return StrCat("context_lens[", s, "] must be from 0 to ", limit, "; got ", context_len,
                    ". Correct the length", remedy);
    }
    if (p.IsCausal(s) && context_len < q_len) {
      return StrCat("context_lens[", s, "] must count the sequence's ", q_len,
                    " query tokens too; got ", context_len,
                    ". Add the new tokens to the length, or correct query_start_loc");
    }
    for (int64_t token = start; p.tree_mask != nullptr && token < end; ++token) {
      if (Params::TreeIsLegal(p.TreeBits(token), q_len)) continue;
      const std::string rule =
          q_len > kMaxTreeTokens
              ? StrCat("no bits, as the sequence has more than ", kMaxTreeTokens, " query tokens")
              : StrCat("bits of the sequence's ", q_len, " query tokens only");
      return StrCat("tree_mask[", token, "] must have ", rule, "; got [", p.tree_mask[2 * token],
                    ", ", p.tree_mask[2 * token + 1], "]. Clear the other bits");
    }
    if (q_len == 0 || context_len == 0 || p.block_tables == nullptr) continue;
    const NeededBlocks needed(p, p.QueryTokensOf(s));
    for (int64_t b = needed.first; b <= needed.last; ++b) {
      const int64_t block = p.block_tables[s * p.max_blocks_per_seq + b];
      if (block < 0 || block >= p.num_blocks) {
        return StrCat("block_tables[", s, ", ", b,
                      "] must be from 0 to num_blocks - 1=", p.num_blocks - 1, "; got ", block,
                      ". The sequence needs a block there, or a shorter length");
      }
    }
  }
  return {};
}

MetadataCopy::MetadataCopy(Params* params) {
  Params& p = *params;
  const int32_t num_seqs = __atomic_load_n(p.num_seqs, __ATOMIC_RELAXED);
  const int64_t count = num_seqs < 0 || num_seqs > p.max_seqs ? 0 : num_seqs;
  const int64_t width = p.block_tables == nullptr ? 0 : p.max_blocks_per_seq;
  struct Array {
    const int32_t** place;
    int64_t size;
  };
  std::vector<Array> arrays = {{&p.query_start_loc, count + 1}};
  if (p.context_lens != nullptr) arrays.push_back({&p.context_lens, count});
  for (const auto& [name, array] : kTokenPairs) {
    if (p.*array != nullptr) arrays.push_back({&(p.*array), 2 * p.num_tokens});
  }
  if (p.causal != nullptr) arrays.push_back({&p.causal, count});
  if (p.prefix_seqs != nullptr) arrays.push_back({&p.prefix_seqs, count});
  int64_t num_copied = 1 + (p.prefix_seqs == nullptr ? 0 : count);
  for (const Array& array : arrays) num_copied += array.size;
  // Not zeroed: only the entries that are copied are touched, however wide the table is.
  memory_.reset(new int32_t[num_copied + count * width]);
  memory_[0] = num_seqs;
  p.num_seqs = memory_.get();
  int32_t* copy = memory_.get() + 1;
  for (const auto& [place, size] : arrays) {
    std::copy_n(*place, size, copy);
    *place = copy;
    copy += size;
  }
  if (p.prefix_seqs != nullptr) {
    int32_t* const context_lens = copy;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t prefix = p.prefix_seqs[s];
      const int64_t before = prefix >= 0 && prefix < s ? context_lens[prefix] : 0;
      context_lens[s] = static_cast<int32_t>(before + p.QueryLen(s));
    }
    p.context_lens = context_lens;
  }
  if (p.block_tables == nullptr) return;
  int32_t* const block_tables = copy;
  for (int64_t s = 0; s < count; ++s) {
    const QueryTokens tokens = p.QueryTokensOf(s);
    if (tokens.first < 0 || tokens.Count() <= 0 || tokens.first + tokens.Count() > p.num_tokens ||
        tokens.context_len <= 0 || tokens.context_len > p.Capacity()) {
      continue;  // no entry is needed
    }
    const NeededBlocks needed(p, tokens);
    const int32_t* row = p.block_tables + s * width;
    std::copy(row + needed.first, row + needed.last + 1, block_tables + s * width + needed.first);
  }
  p.block_tables = block_tables;
}

}  // namespace xla_gpu::paged_attention
