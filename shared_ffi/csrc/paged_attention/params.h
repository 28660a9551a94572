// paged_attention: attention of packed query tokens over a paged key/value cache.
//
// Sequence s, for s in [0, num_seqs), owns the query tokens query_start_loc[s] up to
// query_start_loc[s + 1], q_len of them. Its token i stands at position
//     p = context_lens[s] - q_len + i
// and attends to the positions j with
//     max(0, p - sliding_window + 1) <= j < min(context_lens[s], p + window_right + 1)
// where causal attention has window_right = 0; with `causal`, sequences with another number than 0
// there are causal, and the others are not. Position j lies in block block_tables[s][j /
// block_size] at offset j % block_size. Query head h reads kv head h / (num_heads / num_kv_heads).
// Without a block table, as in varlen_attention, K and V are rows beside the query: block_size is
// 1, and position j lies in block query_start_loc[s] + j. Without context_lens they are q_len.
// With prefix_seqs, sequence s continues the earlier sequence prefix_seqs[s], if that is not -1:
// the tokens of that one, which may itself continue another, are the first of its positions.
//
// With tree masks (a draft tree of speculative decoding), token i attends to some of its sequence's
// query tokens instead: to token j where bit j of its 64 bits is set, which are tree_mask[token],
// the low word first. It attends to the positions before the query tokens as above, with
//     p = context_lens[s] - q_len + (the number of its bits) - 1.
// A token without bits is causal. A sequence with tokens that have bits has at most 64 tokens.
//
// With bidirectional ranges, a token also attends to the positions of its sequence from the first
// number of bidirectional_ranges[token] up to the second, if that is larger. There are no tree
// masks then.
//
// A quantized cache holds k / k_scale and v / v_scale. Scales of groups are multiplied by the
// global scale first.
//
// Where V is a part of K (multi-head latent attention), v_j is the first value_head_size numbers of
// k_j, and v_scale is k_scale. Elsewhere value_head_size is head_size, or less where V is an array
// of its own.
//     logit = scale * (q . k), then soft_cap * tanh(logit / soft_cap) where there is a cap,
//             then - alibi_slopes[h] * |p - j| where there are slopes
//     output = sum_j exp(logit_j - lse) * v_j, in float32 whatever the storage
//     lse = log(sum_j exp(logit_j) + exp(sinks[h]) where there are sinks)
// Every q_len is at most max_query_len, where that is given; the result does not depend on it.
// Rows of no sequence, and rows that attend to nothing, are zero; their lse is -inf, or the sink of
// a row that attends to nothing. Nothing that is not attended to reaches the result: not the rest
// of the cache, and not what tables and lengths hold past num_seqs.
//
// The handler has checked what memory safety needs of this before the CPU kernel runs, in a copy
// that nobody else writes to. What lies on a GPU it cannot read: there the kernels take lengths,
// tables and num_seqs as they come (see cuda/run.h).
#pragma once

#include <cstdint>

#include "../kv_cache.h"
#include "../storage.h"
#include "divisor.h"

namespace xla_gpu::paged_attention {

XLA_GPU_HOST_DEVICE constexpr int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
XLA_GPU_HOST_DEVICE constexpr int64_t Larger(int64_t a, int64_t b) { return a < b ? b : a; }
XLA_GPU_HOST_DEVICE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The bits that are set, and the number of the highest one plus 1.
XLA_GPU_HOST_DEVICE inline int64_t CountBits(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __popcll(bits);
#else
  return __builtin_popcountll(bits);
#endif
}
XLA_GPU_HOST_DEVICE inline int64_t WidthOf(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return 64 - __clzll(static_cast<long long>(bits));
#else
  return bits == 0 ? 0 : 64 - __builtin_clzll(bits);
#endif
}

// Kernels compute logits in units of 1 / log2(e), to use 2^x for the exponential.
inline constexpr float kLog2E = 1.44269504f;
// Larger sinks and soft caps, and larger slopes times a distance, could overflow in these units.
inline constexpr float kMaxSink = 0x1p127f;
inline constexpr float kMaxCap = 0x1p127f;
inline constexpr float kMaxSlope = 0x1p95f;
// Up to this cap, the error of tanh, 2^-23, changes a logit by less than 1e-5. Larger caps need a
// tanh whose error is small relative to the logit.
inline constexpr float kMaxPlainCap = 64;

// The most query tokens of a sequence with a tree mask. No sliding window is shorter.
inline constexpr int64_t kMaxTreeTokens = 64;

// The most positions of a sequence. On a GPU the numbers of the positions of a few more KV tiles
// must fit 32 bits.
inline constexpr int64_t kMaxContextLen = INT32_MAX - 1023;

// The positions from begin up to end; none if that is not after it.
struct Span {
  int64_t begin;
  int64_t end;

  XLA_GPU_HOST_DEVICE bool IsEmpty() const { return begin >= end; }
  // From the first to the last position of the two.
  XLA_GPU_HOST_DEVICE Span Hull(const Span& other) const {
    if (IsEmpty()) return other;
    if (other.IsEmpty()) return *this;
    return {Smaller(begin, other.begin), Larger(end, other.end)};
  }
};

// What a query token leaves out between the first and the last position that it attends to: `count`
// positions from `begin` on, but not the n-th of the first 64 where bit n is set. The numbers have
// 32 bits because the Hopper and the decode kernel have no registers to spare.
struct Holes {
  int32_t begin;
  uint32_t count;
  uint64_t bits;

  // The distance is modulo 2^32: where `count` is 0, `begin` may be any number.
  XLA_GPU_HOST_DEVICE bool Contain(int32_t position) const {
    const uint32_t n = static_cast<uint32_t>(position) - static_cast<uint32_t>(begin);
    return n < count && (n >= 64 || (bits >> n & 1) == 0);
  }
  XLA_GPU_HOST_DEVICE Span Positions() const { return {begin, begin + int64_t{count}}; }
  // The part of the token's span before them.
  XLA_GPU_HOST_DEVICE Span Before(const Span& span) const {
    return {span.begin, count == 0 ? span.end : begin};
  }
};

// The query tokens of a sequence, and what it has beside them.
struct QueryTokens {
  int64_t first;           // in the batch
  int64_t first_position;  // of that token
  int64_t context_len;
  bool is_causal;

  XLA_GPU_HOST_DEVICE int64_t Position(int64_t i) const { return first_position + i; }
  XLA_GPU_HOST_DEVICE int64_t Count() const { return context_len - first_position; }
};

struct Params {
  const void* query;               // [num_tokens, num_heads, head_size]
  KvCache cache;                   // of num_blocks blocks of block_size positions
  const int32_t* context_lens;     // [max_seqs]; null: the q_len of each
  const int32_t* block_tables;     // [max_seqs, max_blocks_per_seq]; null: see above
  const int32_t* query_start_loc;  // [max_seqs + 1]
  const int32_t* num_seqs;         // [1]
  KvScales k_scale;                // of a quantized cache
  KvScales v_scale;
  const float* sinks;                   // [num_heads]; null: none
  const float* alibi_slopes;            // [num_heads]; null: none
  const int32_t* tree_mask;             // [num_tokens, 2]; null: none
  const int32_t* bidirectional_ranges;  // [num_tokens, 2]; null: none
  const int32_t* causal;                // [max_seqs]; null: see is_causal
  const int32_t* prefix_seqs;           // [max_seqs]; null: no sequence continues another
  void* output;                         // [num_tokens, num_heads, value_head_size]
  float* lse;                           // [num_tokens, num_heads]; null: not wanted

  int64_t query_stride;  // elements from one token's query to the next
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  int64_t value_head_size;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  Divisor group;  // the query heads of a kv head
  Divisor block;  // the positions of a block: block_size
  int64_t max_seqs;
  int64_t max_blocks_per_seq;

  float scale;
  int64_t sliding_window;  // 0: none
  int64_t window_right;    // 0 where is_causal
  float soft_cap;          // 0: none
  int64_t max_query_len;   // of any sequence; 0: not known
  bool is_causal;          // all sequences, whatever `causal` says
  bool is_latent;          // V is a part of K

  DType dtype;              // of query and output
  DType cache_dtype;        // of K: that, or one of 8 or 4 bits
  DType value_cache_dtype;  // of V: that of K, but for int8 beside one of 4 bits

  GroupScales k_groups;  // in the place of k_scale
  GroupScales v_groups;

  // Whether rows of K or V have to be multiplied by scales before the products.
  bool NeedsFloat32Rows() const {
    return k_groups.data != nullptr || v_groups.data != nullptr ||
           cache_dtype == DType::kFloat4E2M1 || value_cache_dtype == DType::kFloat4E2M1;
  }

  // Whether all positions of a quantized cache have the same scales, for each kv head.
  XLA_GPU_HOST_DEVICE bool ScalesAreUniform() const {
    return !k_scale.IsPerPosition() && !v_scale.IsPerPosition();
  }

  // The positions that a row of block_tables has room for, and a sequence at most. Without a table
  // max_blocks_per_seq is num_tokens. The sizes may be any numbers, whose product must not
  // overflow.
  XLA_GPU_HOST_DEVICE int64_t Capacity() const {
    const int64_t positions =
        Smaller(max_blocks_per_seq, INT32_MAX) * Smaller(block_size, INT32_MAX);
    return Smaller(positions, kMaxContextLen);
  }

  // The offset of a query head's row in query, and in output.
  XLA_GPU_HOST_DEVICE int64_t QueryOffset(int64_t token, int64_t head) const {
    return token * query_stride + head * head_size;
  }
  XLA_GPU_HOST_DEVICE int64_t OutputOffset(int64_t token, int64_t head) const {
    return (token * num_heads + head) * value_head_size;
  }

  // Whether a sequence is causal: then it has as many keys as queries, or more.
  XLA_GPU_HOST_DEVICE bool IsCausal(int64_t sequence) const {
    return is_causal || (causal != nullptr && causal[sequence] != 0);
  }
  int64_t QueryLen(int64_t sequence) const {
    return int64_t{query_start_loc[sequence + 1]} - query_start_loc[sequence];
  }
  int64_t ContextLen(int64_t sequence) const {
    return context_lens == nullptr ? QueryLen(sequence) : context_lens[sequence];
  }
  QueryTokens QueryTokensOf(int64_t sequence) const {
    const int64_t context_len = ContextLen(sequence);
    return {query_start_loc[sequence], context_len - QueryLen(sequence), context_len,
            IsCausal(sequence)};
  }

  // Without a block table: the token whose K and V are those of a position.
  int64_t TokenAt(int64_t sequence, int64_t position) const {
    int64_t first_position = 0;
    while (prefix_seqs != nullptr) {
      first_position = ContextLen(sequence) - QueryLen(sequence);
      if (position >= first_position) break;
      sequence = prefix_seqs[sequence];
    }
    return query_start_loc[sequence] + position - first_position;
  }
  // Whether a sequence is another one, or continues it, or continues one that does.
  bool Continues(int64_t sequence, int64_t other) const {
    while (sequence > other && prefix_seqs != nullptr) sequence = prefix_seqs[sequence];
    return sequence == other;
  }

  // The positions that a query at `position` attends to, from WindowBegin up to WindowEnd; none if
  // that is not after it. Both grow with the position.
  XLA_GPU_HOST_DEVICE int64_t WindowBegin(int64_t position) const {
    return sliding_window == 0 || sliding_window > position ? 0 : position - sliding_window + 1;
  }
  XLA_GPU_HOST_DEVICE int64_t WindowEnd(const QueryTokens& tokens, int64_t position) const {
    const int64_t after = tokens.context_len - position - 1;  // positions of the sequence
    const int64_t end = position + 1 + Smaller(tokens.is_causal ? 0 : window_right, after);
    return end < 0 ? 0 : end;
  }
  // The bits of a query token's tree mask, of which some say to attend to later tokens; 0: none.
  XLA_GPU_HOST_DEVICE uint64_t TreeBits(int64_t token) const {
    if (tree_mask == nullptr) return 0;
    const int32_t* words = tree_mask + 2 * token;
    return uint64_t{static_cast<uint32_t>(words[1])} << 32 | static_cast<uint32_t>(words[0]);
  }
  // Whether some token of a sequence may have bits.
  XLA_GPU_HOST_DEVICE bool MayBeTree(int64_t q_len) const {
    return tree_mask != nullptr && q_len <= kMaxTreeTokens;
  }
  XLA_GPU_HOST_DEVICE static bool TreeIsLegal(uint64_t bits, int64_t q_len) {
    return q_len > kMaxTreeTokens ? bits == 0 : q_len == kMaxTreeTokens || bits >> q_len == 0;
  }

  // What causality and windows let token i of a sequence attend to.
  XLA_GPU_HOST_DEVICE Span Window(const QueryTokens& tokens, int64_t i) const {
    return {WindowBegin(tokens.Position(i)), WindowEnd(tokens, tokens.Position(i))};
  }
  // The same where there are tree masks.
  XLA_GPU_HOST_DEVICE Span InTree(const QueryTokens& tokens, int64_t i) const {
    const uint64_t bits = TreeBits(tokens.first + i);
    if (bits == 0) return Window(tokens, i);
    return {WindowBegin(tokens.Position(CountBits(bits) - 1)),
            Smaller(tokens.context_len, tokens.Position(WidthOf(bits)))};
  }
  XLA_GPU_HOST_DEVICE bool HasRanges() const { return bidirectional_ranges != nullptr; }
  // The bidirectional range of token i of a sequence, cut to the sequence.
  XLA_GPU_HOST_DEVICE Span RangeOf(const QueryTokens& tokens, int64_t i) const {
    if (bidirectional_ranges == nullptr) return {0, 0};
    const int32_t* range = bidirectional_ranges + 2 * (tokens.first + i);
    const Span span = {Larger(0, range[0]), Smaller(tokens.context_len, range[1])};
    return span.IsEmpty() ? Span{0, 0} : span;
  }

  // From the first to the last position that token i of a sequence attends to.
  XLA_GPU_HOST_DEVICE Span Attended(const QueryTokens& tokens, int64_t i) const {
    return tree_mask == nullptr ? Window(tokens, i).Hull(RangeOf(tokens, i)) : InTree(tokens, i);
  }
  // What it leaves out of them.
  XLA_GPU_HOST_DEVICE Holes HolesOf(const QueryTokens& tokens, int64_t i) const {
    const auto context_len = static_cast<int32_t>(tokens.context_len);
    if (tree_mask != nullptr) {
      const auto first_position = static_cast<int32_t>(tokens.first_position);
      const uint64_t bits = TreeBits(tokens.first + i);
      const int32_t count = bits == 0 ? 0 : context_len - first_position;
      return {first_position, static_cast<uint32_t>(count), bits};
    }
    if (bidirectional_ranges == nullptr) return {0, 0, 0};
    const int32_t* range = bidirectional_ranges + 2 * (tokens.first + i);
    const int32_t range_begin = range[0] > 0 ? range[0] : 0;
    const int32_t range_end = range[1] < context_len ? range[1] : context_len;
    const auto position = static_cast<int32_t>(tokens.Position(i));
    const auto window_begin = static_cast<int32_t>(WindowBegin(position));
    const auto window_end = static_cast<int32_t>(WindowEnd(tokens, position));
    const int32_t begin = window_end < range_end ? window_end : range_end;
    const int32_t end = window_begin > range_begin ? window_begin : range_begin;
    const bool are_two = range_begin < range_end && window_begin < window_end;
    return {begin, static_cast<uint32_t>(are_two && begin < end ? end - begin : 0), 0};
  }
  // From the first to the last position that any of the tokens from i to `last` attends to.
  XLA_GPU_HOST_DEVICE Span AttendedByAny(const QueryTokens& tokens, int64_t i, int64_t last) const {
    Span any = {WindowBegin(tokens.Position(i)), WindowEnd(tokens, tokens.Position(last))};
    if (bidirectional_ranges != nullptr) {
      for (; i <= last; ++i) any = any.Hull(RangeOf(tokens, i));
    } else if (MayBeTree(tokens.Count())) {
      any = InTree(tokens, i);
      while (++i <= last) any = any.Hull(InTree(tokens, i));
    }
    return any;
  }

  // The sink and the slope of a query head, in units of 1 / log2(e). Beyond its limit a sink leaves
  // no weight to any position, and a slope leaves all of it to the nearest (or farthest) position.
  XLA_GPU_HOST_DEVICE float Sink(int64_t head) const {
    return (sinks[head] > kMaxSink ? kMaxSink : sinks[head]) * kLog2E;
  }
  XLA_GPU_HOST_DEVICE float AlibiSlope(int64_t head) const {
    const float slope = alibi_slopes[head];
    return (slope > kMaxSlope ? kMaxSlope : slope < -kMaxSlope ? -kMaxSlope : slope) * kLog2E;
  }
  // The log-sum-exp of a row, given what was computed with Sink(). A NaN stays: what the row
  // attends to is NaN, or its block table or tree mask is bad.
  XLA_GPU_HOST_DEVICE float Lse(int64_t head, float computed) const {
    const bool is_sink = sinks != nullptr && sinks[head] > kMaxSink && computed == computed;
    return is_sink ? sinks[head] : computed;
  }
  // Whether token i of a sequence attends to any position. In a tree all do.
  XLA_GPU_HOST_DEVICE bool Attends(const QueryTokens& tokens, int64_t i) const {
    return !Window(tokens, i).IsEmpty() || !RangeOf(tokens, i).IsEmpty();
  }
};

// An optional array of [num_tokens, 2] integers, and the name of its operand.
struct TokenPairs {
  const char* name;
  const int32_t* Params::* array;
};
inline constexpr TokenPairs kTokenPairs[] = {
    {"tree_mask", &Params::tree_mask},
    {"bidirectional_ranges", &Params::bidirectional_ranges},
};

// An optional array of [num_heads] numbers, and the name of its operand.
struct HeadNumbers {
  const char* name;
  const float* Params::* array;
};
inline constexpr HeadNumbers kHeadNumbers[] = {
    {"sinks", &Params::sinks},
    {"alibi_slopes", &Params::alibi_slopes},
};

}  // namespace xla_gpu::paged_attention
