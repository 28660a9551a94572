#include "metadata.h"

#include "../str_cat.h"

namespace xla_gpu::paged_attention {

std::string MetadataFault(const Params& p) {
  const int64_t num_seqs = *p.num_seqs;
  if (num_seqs < 0 || num_seqs > p.max_seqs) {
    return StrCat("num_seqs must be from 0 to max_seqs=", p.max_seqs, "; got ", num_seqs);
  }
  if (num_seqs > 0 && p.query_start_loc[0] < 0) {
    return StrCat("query_start_loc[0] must be at least 0; got ", p.query_start_loc[0]);
  }
  const int64_t capacity = p.max_blocks_per_seq * p.block_size;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t start = p.query_start_loc[s], end = p.query_start_loc[s + 1];
    const int64_t q_len = end - start, context_len = p.context_lens[s];
    if (q_len < 0) {
      return StrCat("query_start_loc must not decrease; got query_start_loc[", s + 1, "]=", end,
                    " after query_start_loc[", s, "]=", start);
    }
    if (end > p.num_tokens) {
      return StrCat("query_start_loc[", s + 1, "] must be at most num_tokens=", p.num_tokens,
                    "; got ", end);
    }
    if (p.max_query_len != 0 && q_len > p.max_query_len) {
      return StrCat("query_start_loc must give sequence ", s,
                    " at most max_query_len=", p.max_query_len, " tokens; got ", q_len);
    }
    if (context_len < 0 || context_len > capacity) {
      return StrCat("context_lens[", s,
                    "] must be from 0 to max_blocks_per_seq * block_size=", capacity, "; got ",
                    context_len);
    }
    if (p.window_right == 0 && context_len < q_len) {
      return StrCat("context_lens[", s, "] must count the sequence's ", q_len,
                    " query tokens too; got ", context_len);
    }
    if (q_len == 0 || context_len == 0) continue;
    const int64_t first_block = p.WindowBegin(context_len - q_len) / p.block_size;
    const int64_t last_block = (context_len - 1) / p.block_size;
    for (int64_t b = first_block; b <= last_block; ++b) {
      const int64_t block = p.block_tables[s * p.max_blocks_per_seq + b];
      if (block < 0 || block >= p.num_blocks) {
        return StrCat("block_tables[", s, ", ", b,
                      "] must be from 0 to num_blocks - 1=", p.num_blocks - 1, "; got ", block);
      }
    }
  }
  return {};
}

}  // namespace xla_gpu::paged_attention
