// A consumer of the prefill kernel: computes its rows of the work items from the places that
// prefill.cuh declares, and frees these.
#pragma once

#include "../softmax.cuh"
#include "prefill.cuh"

namespace xla_gpu::paged_attention {

// Transposes four words of four adjacent lanes: lane l gets the words l % 4 of all four.
__device__ __forceinline__ void TransposeInQuads(uint32_t (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool is_upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const uint32_t other = gpu::ShuffleXor(is_upper ? words[i] : words[i + step], step);
      words[i] = is_upper ? other : words[i];
      words[i + step] = is_upper ? words[i + step] : other;
    }
  }
}

// Computes a consumer's rows of one work item.
template <typename T, typename C, int kHeadSize>
class PrefillConsumer {
  using Shared = PrefillShared<T, C, kHeadSize>;
  using QueryRows = typename Shared::QueryRows;
  using CacheRows = typename Shared::CacheRows;
  using Element = typename Shared::Element;
  using QueryState = typename Shared::QueryState;
  using TileState = typename Shared::TileState;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kColumns = kHeadSize % 128 == 0 ? 128 : 64;  // of a product with values

 public:
  __device__ PrefillConsumer(const Params& p, const Scratch& scratch, const PrefillWork& work,
                             int consumer, Shared* shared)
      : p_(p),
        scratch_(scratch),
        item_(work.item),
        rows_(work.rows),
        work_(work),
        shared_(*shared),
        consumer_(consumer),
        common_(work.common),
        softmax_(p, work.rows, RowOf(0)) {}

  // `stage` is the stage of the item's first KV tile, and becomes that of the next item's first KV
  // tile.
  __device__ void Compute(QueryState query_stage, TileState* stage) {
    int32_t tile = Tiles(item_, kTile).begin;
    for (const Tiles own(rows_, kTile); tile < own.begin; ++tile) Skip(stage);
    PipelineBarriers<1>& query_barriers = shared_.query_barriers[consumer_];
    query_barriers.WaitFilled(query_stage);
    if constexpr (kIs8Bit<C>) {
      const float* factors = shared_.query_factors[consumer_];
      for (int r = 0; r < 2; ++r) softmax_.MultiplyScale(r, factors[RowOf(r)] * work_.k_scale);
    }
    if (rows_.begin < rows_.end) {
      tile = ComputeTiles(query_barriers, query_stage, stage);
    } else {
      query_barriers.Free(query_stage);
    }
    for (const Tiles all(item_, kTile); tile < all.end; ++tile) Skip(stage);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      item_.num_splits > 1 ? WritePartialResult(r) : WriteRow(r);
    }
  }

 private:
  // Computes the tiles that hold positions of the consumer's rows. Returns the tile after them.
  __device__ int32_t ComputeTiles(PipelineBarriers<1>& query_barriers, QueryState query_stage,
                                  TileState* stage) {
    int32_t tile = rows_.begin / kTile;
    float logits[kTile / 8][4];
    uint32_t weights[kTile / 16][4];
    float rescales[2];
    WaitForKeys(*stage);
    TakeTurn();
    StartLogits(*stage, logits);
    PassTurn();
    gpu::WaitProducts<0>(logits);
    FreeKeys(*stage);
    Weigh(tile, logits, rescales);
    Pack(logits, weights);
    for (; tile < (rows_.end - 1) / kTile; ++tile) {
      const TileState next = stage->Next();
      if (WaitForValues(tile, *stage)) {
        WaitForKeys(next);
        TakeTurn();
        StartLogits(next, logits);
        StartSums(*stage, weights);
        PassTurn();
        gpu::WaitProducts<1>(logits);
        FreeKeys(next);
        Weigh(tile + 1, logits, rescales);
        gpu::KeepRegisters(logits);
        // ptxas moves a wait up within its basic block. Without the branch, the weights would not
        // be computed while the values are multiplied.
        if (gpu::AnyInWarp(rescales[0] != 1 || rescales[1] != 1)) {
          gpu::WaitProducts<0>(sums_);
          Softmax::RescaleSums(rescales, sums_);
        } else {
          gpu::WaitProducts<0>(sums_);
        }
        gpu::KeepRegisters(weights);
      } else {
        AddOneByOne(tile, *stage, weights);
        WaitForKeys(next);
        TakeTurn();
        StartLogits(next, logits);
        PassTurn();
        gpu::WaitProducts<0>(logits);
        FreeKeys(next);
        Weigh(tile + 1, logits, rescales);
        Softmax::RescaleSums(rescales, sums_);
      }
      FreeValues(*stage);
      Pack(logits, weights);
      *stage = next;
    }
    query_barriers.Free(query_stage);
    if (WaitForValues(tile, *stage)) {
      StartSums(*stage, weights);
      gpu::WaitProducts<0>(sums_);
    } else {
      AddOneByOne(tile, *stage, weights);
    }
    FreeValues(*stage);
    *stage = stage->Next();
    return tile + 1;
  }

  static __device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }

  // Consumers start products in turn, one turn for each KV tile of an item.
  __device__ void TakeTurn() const {
    gpu::SyncThreads(kTurnBarrier + consumer_, kConsumers * kThreads);
  }
  __device__ void PassTurn() const {
    gpu::ArriveThreads(kTurnBarrier + (consumer_ ^ 1), kConsumers * kThreads);
  }

  __device__ void Skip(TileState* stage) {
    shared_.keys_barriers.WaitFilled(*stage);
    FreeKeys(*stage);
    if (!Shared::KeysHoldValues(p_)) shared_.values_barriers.WaitFilled(*stage);
    FreeValues(*stage);
    TakeTurn();
    PassTurn();
    *stage = stage->Next();
  }

  __device__ const Element* Values(TileState stage) const {
    return Shared::KeysHoldValues(p_) ? shared_.keys[stage.index] : shared_.values[stage.index];
  }
  __device__ void FreeKeys(TileState stage) {
    if (!Shared::KeysHoldValues(p_)) shared_.keys_barriers.Free(stage);
  }
  __device__ void FreeValues(TileState stage) {
    (Shared::KeysHoldValues(p_) ? shared_.keys_barriers : shared_.values_barriers).Free(stage);
  }

  __device__ void WaitForKeys(TileState stage) {
    shared_.keys_barriers.WaitFilled(stage);
    gpu::FenceAsyncProxy();
  }

  // Returns whether V of the tile may be multiplied: a weight of zero times an infinite or NaN
  // value would spoil the sum of a row that does not attend to it.
  __device__ bool WaitForValues(int32_t tile, TileState stage) {
    if (!Shared::KeysHoldValues(p_)) {
      shared_.values_barriers.WaitFilled(stage);
      gpu::FenceAsyncProxy();
    }
    if (!common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) return true;
    const Element* values = Values(stage);
    constexpr int kChunks = CacheRows::kElements / CacheRows::kChunk;
    const bool found =
        HoldsNonFinite<Element>(static_cast<int>(threadIdx.x) % kThreads, kChunks, kThreads,
                                [&](int i) { return values + i * CacheRows::kChunk; });
    return !gpu::AnyInThreads(kThreadsBarrier + consumer_, kThreads, found);
  }

  // Starts logits = q k^T.
  __device__ void StartLogits(TileState stage, float (&logits)[kTile / 8][4]) {
    gpu::FenceProducts(logits);
    const Element *query = shared_.query[consumer_], *keys = shared_.keys[stage.index];
#pragma unroll
    for (int column = 0; column < kHeadSize; column += 16) {
      gpu::StartProduct(logits, QueryRows::Columns(query, column), CacheRows::Columns(keys, column),
                        /*accumulates=*/column > 0, Element{});
    }
    gpu::CommitProducts();
  }

  // Starts sums += weights * v.
  __device__ void StartSums(TileState stage, uint32_t (&weights)[kTile / 16][4]) {
    gpu::KeepRegisters(weights);
    gpu::FenceProducts(sums_);
    const Element* values = Values(stage);
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
      for (int column = 0; column < kHeadSize; column += kColumns) {
        auto& sums = *reinterpret_cast<float(*)[kColumns / 8][4]>(sums_ + column / 8);
        gpu::StartProductTransposed(sums, weights[step], CacheRows::Rows(values, step * 16, column),
                                    Element{});
      }
    }
    gpu::CommitProducts();
  }

  // Turns the logits of a KV tile into weights.
  __device__ void Weigh(int32_t tile, float (&logits)[kTile / 8][4], float (&rescales)[2]) {
    const int32_t begin = tile * kTile, end = begin + kTile;
    softmax_.ToLogits(begin, /*masked=*/!common_.Contains(begin, end), logits);
    softmax_.Weigh(logits, rescales);
  }

  // Rounds weights to 16 bits, laid out as the left operand of a product over each 16 positions.
  static __device__ __forceinline__ void Pack(const float (&from)[kTile / 8][4],
                                              uint32_t (&to)[kTile / 16][4]) {
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&block)[4] = from[2 * n + i / 2];
        to[n][i] = gpu::Pack(block[i % 2 * 2], block[i % 2 * 2 + 1], Element{});
      }
    }
  }

  // sums += weights * v, one position after the other: a row takes only values that it attends to.
  // Uses the weights up.
  __device__ void AddOneByOne(int32_t tile, TileState stage, uint32_t (&weights)[kTile / 16][4]) {
    const Element* values = Values(stage);
#pragma unroll 1
    for (int j = 0; j < kTile; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t pair = gpu::Shuffle(j % 16 < 8 ? weights[0][r] : weights[0][2 + r],
                                           Lane() / 4 * 4 + j % 8 / 2);
        if (!softmax_.Attends(r, tile * kTile + j)) continue;
        const float weight =
            gpu::ToFloat(Element{static_cast<uint16_t>(j % 2 ? pair >> 16 : pair)});
#pragma unroll
        for (int n = 0; n < kHeadSize / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const Element value = values[CacheRows::Offset(j, n) + Lane() % 4 * 2 + e];
            const float factor = IsFinite(value) ? weight : 1.0f;
            sums_[n][2 * r + e] = gpu::Fma(factor, gpu::ToFloat(value), sums_[n][2 * r + e]);
          }
        }
      }
      if (j % 16 < 15) continue;
      // The weights of the next 16 positions move to the front. An index would put all in memory.
#pragma unroll
      for (int step = 0; step < kTile / 16 - 1; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[step][i] = weights[step + 1][i];
      }
    }
  }

  // The number of the lane's row r among the consumer's rows.
  static __device__ __forceinline__ int RowOf(int r) {
    return static_cast<int>(threadIdx.x) % kThreads / gpu::kWarpSize * 16 + Lane() / 4 + 8 * r;
  }

  // Writes the lane's row r to the output.
  __device__ __forceinline__ void WriteRow(int r) {
    const RowState state = softmax_.State(r);
    const int row = RowOf(r);
    const bool exists = row < rows_.num_rows;
    float factor = 0;
    if (exists) {
      const RowPlace place(p_, rows_, row);
      const float sink = SinkOf(p_, place.head);
      const float max = fmaxf(state.max, sink);
      const float weight = gpu::Exp2(state.max - ShiftOf(max));
      const float sum = SumOf(max, sink, 1, [&](int64_t) { return state; });
      const RowRange& range = softmax_.Range(r);
      const float divisor = range.begin < range.end ? sum : 1.0f;  // without keys the sum is zero
      factor = weight / divisor;
      if (kIs8Bit<C> && range.begin < range.end) factor *= work_.v_scale;
      if (Lane() % 4 == 0) {
        WriteLse(p_, item_.first_token + place.token, place.head, {max, sum});
      }
    }
    T* output = static_cast<T*>(p_.output) + (exists ? OutputOffset(p_, rows_, row) : 0);
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; n += 4) {
      struct alignas(16) {
        uint32_t word[4];
      } columns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns.word[i] =
            gpu::Pack(sums_[n + i][2 * r] * factor, sums_[n + i][2 * r + 1] * factor, T{});
      }
      TransposeInQuads(columns.word);  // now 8 adjacent columns of group n + Lane() % 4
      const int column = (n + Lane() % 4) * 8;
      if (exists && column < p_.value_head_size) {
        *reinterpret_cast<decltype(columns)*>(output + column) = columns;
      }
    }
  }

  // Writes the lane's row r to the scratch: the work item is a split.
  __device__ __forceinline__ void WritePartialResult(int r) {
    const RowState state = softmax_.State(r);
    const int row = RowOf(r);
    if (row >= rows_.num_rows) return;
    const RowPlace place(p_, rows_, row);
    const int64_t index = PartialOf(scratch_, rows_, place) * p_.num_heads + place.head;
    if (Lane() % 4 == 0) scratch_.states[index] = state;
    float* partial = scratch_.partials + index * p_.value_head_size;
    const float factor = kIs8Bit<C> && state.sum != 0 ? work_.v_scale : 1.0f;
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; ++n) {
      if (n * 8 >= p_.value_head_size) break;
      float* columns = partial + n * 8 + Lane() % 4 * 2;
      columns[0] = sums_[n][2 * r] * factor;
      columns[1] = sums_[n][2 * r + 1] * factor;
    }
  }

  const Params& p_;
  const Scratch& scratch_;
  const Item& item_;
  const Item& rows_;  // the consumer's
  const PrefillWork& work_;
  Shared& shared_;
  const int consumer_;
  // With a cache of 8 bits there are no registers for a copy.
  const std::conditional_t<kIs8Bit<C>, const CommonRange&, CommonRange> common_;
  Softmax softmax_;
  float sums_[kHeadSize / 8][4] = {};  // laid out as logits, with columns in place of positions
};

}  // namespace xla_gpu::paged_attention
