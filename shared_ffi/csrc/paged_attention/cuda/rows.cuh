// What all attention kernels need for the rows of a work item: mask, slots and biases before the
// products, and writing results after them.
#pragma once

#include <type_traits>

#include "schedule.cuh"

namespace xla_gpu::paged_attention {

inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kInfinity = __builtin_huge_valf();

// A row's query token, counted from the first of its sequence, and its query head.
struct RowPlace {
  int64_t token;
  int64_t head;

  __device__ RowPlace(int64_t token, int64_t head) : token(token), head(head) {}
  __device__ RowPlace(const Params& p, const Item& item, int64_t row) {
    const int64_t group = GqaGroupSize(p), sequence_row = item.first_row + row;
    token = DivideU32(sequence_row, group);
    head = item.kv_head * group + sequence_row - token * group;
  }
};

// The positions [begin, end) of a work item that one of its rows attends to, but for its RowHoles.
struct RowRange {
  int32_t begin;
  int32_t end;

  RowRange() = default;
  __device__ RowRange(const Params& p, const Item& item, int64_t row) : begin(0), end(0) {
    if (row >= item.num_rows) return;
    *this = OfToken(p, item, DivideU32(item.first_row + row, GqaGroupSize(p)));
  }

  // Of the sequence's token i.
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

// The offset in the cache, in elements, of a position's row of kv head 0. -1 if the position is not
// needed, or its block id is outside the pool.
struct PlainSlot {
  int64_t offset = -1;
};

// A slot of an 8-bit cache, with the scales of the work item's kv head.
struct ScaledSlot {
  int64_t offset = -1;
  float k_scale = 1;
  float v_scale = 1;
};

// The slot of a cache of type C.
template <typename C>
using Slot = std::conditional_t<kIs8Bit<C>, ScaledSlot, PlainSlot>;

// The offset of a slot in bytes. Aligned, and never read, where there is no slot.
template <typename C>
__device__ __forceinline__ int64_t BytesTo(const Slot<C>& slot) {
  return slot.offset >= 0 ? slot.offset * static_cast<int64_t>(sizeof(C)) : INT64_MIN;
}

// The same in chunks of 16 bytes, as one register: kNoSlot where there is no slot. For the kernels
// whose calls FitChunks.
inline constexpr uint32_t kNoSlot = UINT32_MAX;

template <typename C>
__device__ __forceinline__ uint32_t ChunksTo(const Slot<C>& slot) {
  constexpr int kChunk = 16 / sizeof(C);  // elements
  return slot.offset >= 0 ? static_cast<uint32_t>(slot.offset / kChunk) : kNoSlot;
}

// The same in the array of V.
__device__ __forceinline__ uint32_t ChunksOfValue(const Params& p, uint32_t chunks) {
  const auto factor = static_cast<uint32_t>(p.cache.value_factor);
  return chunks == kNoSlot ? kNoSlot : (chunks >> p.cache.value_shift) * factor;
}

// The KV tiles [begin, end) that hold a work item's positions.
struct Tiles {
  int32_t begin;
  int32_t end;

  __device__ Tiles(const Item& item, int32_t tile)
      : begin(item.begin / tile), end(max(begin, (item.end + tile - 1) / tile)) {}
};

// The KV tiles of a work item before the first one that it has without bidirectional ranges. Warps
// take tiles in turn from there on: ranges change no bit of a row that has none.
__device__ __forceinline__ int32_t NumTilesBefore(const Params& p, const Item& item, int32_t tile) {
  const auto begin = static_cast<int32_t>(p.WindowBegin(FirstPosition(p, item)));
  return max(0, begin / tile - item.begin / tile);
}

__device__ __forceinline__ bool IsIn(const Item& item, int32_t position) {
  return item.begin <= position && position < item.end;
}

// The block id of a position.
__device__ __forceinline__ int32_t BlockOf(const Params& p, const Item& item, int32_t position) {
  const uint32_t logical = static_cast<uint32_t>(position) / static_cast<uint32_t>(p.block_size);
  return p.block_tables[item.sequence * p.max_blocks_per_seq + logical];
}

// The slot of a position in a block. Sets *is_bad if the block id is outside the pool.
template <typename C>
__device__ __forceinline__ Slot<C> SlotIn(const Params& p, const Item& item, int64_t block,
                                          int32_t position, bool* is_bad) {
  if (block < 0 || block >= p.num_blocks) {
    *is_bad = true;
    return {};
  }
  const uint32_t offset = static_cast<uint32_t>(position) % static_cast<uint32_t>(p.block_size);
  Slot<C> slot;
  slot.offset = p.cache.Offset(block, offset);
  if constexpr (kIs8Bit<C>) {
    slot.k_scale = p.k_scale.At(block, offset, item.kv_head);
    slot.v_scale = p.v_scale.At(block, offset, item.kv_head);
  }
  return slot;
}

// Finds the slot of a position. Sets *is_bad if its block id is outside the pool.
template <typename C>
__device__ __forceinline__ Slot<C> FindSlot(const Params& p, const Item& item, int32_t position,
                                            bool* is_bad) {
  return SlotIn<C>(p, item, BlockOf(p, item, position), position, is_bad);
}

// The K, and the V, of a slot and kv head.
template <typename T>
__device__ __forceinline__ const T* KeyOf(const Params& p, int64_t slot, int64_t kv_head) {
  return static_cast<const T*>(p.cache.keys) + slot + kv_head * p.cache.head_stride;
}
template <typename T>
__device__ __forceinline__ const T* ValueOf(const Params& p, int64_t slot, int64_t kv_head) {
  return static_cast<const T*>(p.cache.values) +
         p.cache.OffsetOfValue(slot + kv_head * p.cache.head_stride);
}

// Whether two numbers of K, or of V, share an element. C: type of the cache.
template <typename C>
__device__ __forceinline__ bool IsInt4(DType dtype) {
  return std::is_same_v<C, Int4OrInt8> && dtype == DType::kInt4;
}

// Number d of a row of int4.
template <typename C>
__device__ __forceinline__ float NumberOf(const C* row, int d) {
  const uint32_t pair = Expand(reinterpret_cast<const Int4Pair*>(row)[d / 2]);
  return static_cast<int8_t>(pair >> d % 2 * 8);
}

// The four numbers in the lower half of a word of int4, as int8.
__device__ __forceinline__ uint32_t Expand4(uint32_t word) {
  const uint32_t pairs = (word & 0xff) | (word & 0xff00) << 8;
  const uint32_t halves = (pairs | pairs << 4) & 0x0f0f0f0f;
  return halves | (halves & 0x08080808) * 0x1e;  // 8 * 0x1e is 0xf0
}

// The offset of a row in query, and in output.
__device__ __forceinline__ int64_t QueryOffset(const Params& p, const Item& item, int64_t row) {
  const RowPlace place(p, item, row);
  return p.QueryOffset(item.first_token + place.token, place.head);
}
__device__ __forceinline__ int64_t OutputOffset(const Params& p, const Item& item, int64_t row) {
  const RowPlace place(p, item, row);
  return p.OutputOffset(item.first_token + place.token, place.head);
}

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

// Calls what(Q()) for the type Q of query and output. T is the type of the cache; Q is T unless T
// has 8 bits.
template <typename T, typename Do>
__device__ __forceinline__ void WithQueryType(const Params& p, const Do& what) {
  if constexpr (!kIs8Bit<T>) {
    what(T());
  } else if (p.dtype == DType::kFloat32) {
    what(float());
  } else if (p.dtype == DType::kFloat16) {
    what(Half());
  } else {
    what(BFloat16());
  }
}

// The sink of a head, in units of 1 / log2(e).
__device__ inline float SinkOf(const Params& p, int64_t head) {
  return p.sinks == nullptr ? -kInfinity : p.Sink(head);
}

// Writes the log-sum-exp of a finished row. One thread calls it.
__device__ inline void WriteLse(const Params& p, int64_t token, int64_t head, const RowState& row) {
  if (p.lse == nullptr) return;
  p.lse[token * p.num_heads + head] = p.Lse(head, (row.max + log2f(row.sum)) * kLn2);
}

// What the logits of a row are taken relative to: the largest, if there is any.
__device__ __forceinline__ float ShiftOf(float max) { return max == -kInfinity ? 0.0f : max; }

// The sum of 2^(logit - ShiftOf(max)) over a row's sink and its `count` partial results, of which
// state(n) is one.
template <typename StateAt>
__device__ __forceinline__ float SumOf(float max, float sink, int64_t count, const StateAt& state) {
  const float shift = ShiftOf(max);
  float sum = gpu::Exp2(sink - shift);
#pragma unroll 4
  for (int64_t n = 0; n < count; ++n) {
    sum = gpu::Fma(gpu::Exp2(state(n).max - shift), state(n).sum, sum);
  }
  return sum;
}

// Rescale factors for merging two partial results: both are brought to the larger max. Splits are
// merged from the left, whoever does it: a row's bits follow from its sequence alone.
struct Rescale {
  float before_factor;
  float split_factor;

  __device__ Rescale(float max_before, float max_of_split) {
    const float shift = ShiftOf(fmaxf(max_before, max_of_split));
    before_factor = gpu::Exp2(max_before - shift);
    split_factor = gpu::Exp2(max_of_split - shift);
  }

  // The factors of another lane.
  __device__ Rescale FromLane(int lane) const {
    Rescale rescale(*this);
    rescale.before_factor = gpu::Shuffle(before_factor, lane);
    rescale.split_factor = gpu::Shuffle(split_factor, lane);
    return rescale;
  }

  __device__ float Join(float before, float split) const {
    return gpu::Fma(split, split_factor, before * before_factor);
  }
};

// Joins the sink of a row's head to what all splits have seen, after the last of them. Returns the
// factor of the row's sums of values.
__device__ __forceinline__ float JoinSink(const Params& p, int64_t head, RowState* row) {
  const float sink = SinkOf(p, head);
  const Rescale rescale(row->max, sink);
  *row = {fmaxf(row->max, sink), rescale.Join(row->sum, 1.0f)};
  return rescale.before_factor;
}

// A thread block that computes the first splits of a sequence and kv head folds them itself. It
// leaves the fold in the slot of the last of these splits, and its number as the state of a row's
// first split; or it writes the row, if it has all splits.
struct MergedSplits {
  static constexpr float kMerged = -1;  // in place of a sum, which is not negative
  static constexpr float kWritten = -2;

  static __device__ __forceinline__ RowState UpTo(int32_t split) {
    return {static_cast<float>(split), kMerged};
  }
  static __device__ __forceinline__ RowState All() { return {0, kWritten}; }

  // The first split to merge, given the state of split 0; -1 if the row is written.
  static __device__ __forceinline__ int32_t First(const RowState& state) {
    if (state.sum == kWritten) return -1;
    return state.sum == kMerged ? static_cast<int32_t>(state.max) : 0;
  }
};

// Calls copy(row, chunk, from, exists) for each chunk of a query tile in shared memory: where it
// comes from, and whether it exists. `thread` is one of kThreads.
template <typename T, typename QueryRows, typename Copy>
__device__ __forceinline__ void ForQueryChunks(const Params& p, const Item& item, int first_row,
                                               int num_rows, int thread, const Copy& copy) {
  for (int i = thread; i < num_rows * QueryRows::kChunks; i += kThreads) {
    const int row = i / QueryRows::kChunks, chunk = i % QueryRows::kChunks;
    const int column = chunk * QueryRows::kChunk;
    const bool exists = first_row + row < item.num_rows && column < p.head_size;
    const int64_t offset = exists ? QueryOffset(p, item, first_row + row) + column : 0;
    copy(row, chunk, static_cast<const T*>(p.query) + offset, exists);
  }
}

// A chunk of 16 bytes of a row: pairs of 16-bit numbers.
struct alignas(16) FourPairs {
  uint32_t pair[4] = {};
};

// A chunk of a query row as float16. The row is divided by a power of two, `factor`, that leaves
// its largest number below 4. The kLanes lanes of the row call it together.
template <int kLanes, typename T>
__device__ __forceinline__ FourPairs HalvesOf(const T* from, bool exists, float* factor) {
  constexpr int kElements = 8;
  static_assert(gpu::kWarpSize % kLanes == 0, "the lanes of a row are in one warp");
  struct alignas(16) Elements {
    T element[kElements] = {};
  };
  const Elements elements = exists ? *reinterpret_cast<const Elements*>(from) : Elements();
  float numbers[kElements], largest = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    numbers[i] = gpu::ToFloat(elements.element[i]);
    largest = fmaxf(largest, fabsf(numbers[i]));
  }
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    largest = fmaxf(largest, gpu::ShuffleXor(largest, mask));
  }
  const uint32_t exponent = min(max(BitCast<uint32_t>(largest) >> 23, 1u), 253u);
  const float inverse = BitCast<float>((254 - exponent) << 23);
  FourPairs pairs;
#pragma unroll
  for (int i = 0; i < kElements / 2; ++i) {
    pairs.pair[i] = gpu::Pack(numbers[2 * i] * inverse, numbers[2 * i + 1] * inverse, Half{});
  }
  *factor = BitCast<float>(exponent << 23);
  return pairs;
}

// Where a row of a split leaves its partial result.
__device__ __forceinline__ int64_t SlotOf(const Scratch& scratch, const Item& item,
                                          const RowPlace& place) {
  const int64_t token = item.first_token + place.token;
  return scratch.Slot(item.sequence, place.token, token, item.num_splits) + item.split;
}

// Tells the Combine kernel whether a work item met a block id outside the pool, or a tree mask that
// is not legal. One thread calls it.
__device__ __forceinline__ void Report(const Params& p, const Scratch& scratch, const Item& item,
                                       bool is_bad) {
  if (item.kv_head != 0) return;
  *scratch.IsBad(p, item.sequence, item.first_token, item.flag, item.split, item.num_splits) =
      is_bad;
}

// Columns of V that a warp of the tensor core kernel adds up at most.
inline constexpr int kMaxColumns = 256;
// The largest head whose kernel has room in shared memory for a V that is not a part of K.
inline constexpr int kMaxOwnValues = 2 * kMaxColumns;

// The partial results, in shared memory, of `num_parts` warps for the same rows at different
// positions.
struct Parts {
  int num_parts;
  const RowState* states;  // [num_parts, rows]
  const float* sums;       // [num_parts, rows, stride]
  int rows;
  int stride;
  int columns;           // of V, or all that are left
  int first_column = 0;  // of V
};

// Merges the parts in their order and writes the rows: to the output, or to the scratch if the work
// item is a split.
template <typename T>
__device__ void WriteRows(const Params& p, const Scratch& scratch, const Item& item,
                          const Parts& parts, bool is_bad) {
  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  if (threadIdx.x == 0) Report(p, scratch, item, is_bad);
  for (int row = warp; row < item.num_rows; row += kWarps) {
    const RowPlace place(p, item, row);
    const int64_t token = item.first_token + place.token;
    const float sink = item.num_splits == 1 ? SinkOf(p, place.head) : -kInfinity;
    float max = sink, weights[kWarps] = {};
    for (int part = 0; part < parts.num_parts; ++part) {
      max = fmaxf(max, parts.states[part * parts.rows + row].max);
    }
    const auto state = [&](int64_t part) { return parts.states[part * parts.rows + row]; };
    const float sum = SumOf(max, sink, parts.num_parts, state);
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      if (part < parts.num_parts) weights[part] = gpu::Exp2(state(part).max - ShiftOf(max));
    }
    const RowRange range(p, item, row);
    const float divisor = range.begin < range.end ? sum : 1.0f;  // without keys the sum is zero
    const int64_t slot = SlotOf(scratch, item, place), index = slot * p.num_heads + place.head;
    T* output = static_cast<T*>(p.output) + OutputOffset(p, item, row);
    output += parts.first_column;
    float* partial = scratch.partials + index * p.value_head_size + parts.first_column;
    const int64_t columns = Smaller(parts.columns, p.value_head_size - parts.first_column);
    for (int d = lane; d < columns; d += gpu::kWarpSize) {
      float value = 0;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        if (part >= parts.num_parts) break;
        value = gpu::Fma(weights[part], parts.sums[(part * parts.rows + row) * parts.stride + d],
                         value);
      }
      if (item.num_splits == 1) {
        gpu::FromFloat(value / divisor, output + d);
      } else {
        partial[d] = value;
      }
    }
    if (lane == 0 && item.num_splits > 1) scratch.states[index] = {max, sum};
    if (lane == 0 && item.num_splits == 1) WriteLse(p, token, place.head, {max, sum});
  }
}

}  // namespace xla_gpu::paged_attention
