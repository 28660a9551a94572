// A consumer of the prefill kernel: computes its rows of the work items from the places that
// prefill.cuh declares, and frees these.
#pragma once

#include "../partial_results.cuh"
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
                             int consumer, const PrefillMaps& maps, Shared* shared)
      : p_(p),
        scratch_(scratch),
        maps_(maps),
        item_(work.item),
        rows_(work.rows),
        work_(work),
        shared_(*shared),
        consumer_(consumer),
        turn_barrier_(kIs8Bit<C> ? kTurnBarrier + consumer
                                 : kTurnBarrier - 1 + static_cast<int>(threadIdx.x) / kThreads),
        next_turn_barrier_(Kept(2 * kTurnBarrier + kConsumers - 1 - turn_barrier_)),
        query_start_(Kept(QueryRows::StartOf(shared->query[consumer]))),
        keys_start_(Kept(CacheRows::StartOf(shared->keys[0]))),
        common_(work.common),
        softmax_(p, work.rows, RowOf(0), RangeOf(RowOf(0)), RangeOf(RowOf(1))) {}

  // `stage` is the stage of the item's first KV tile, and becomes that of the next item's first KV
  // tile.
  __device__ void Compute(TileState* stage) {
    int32_t tile = Tiles(item_, kTile).begin;
    for (const Tiles own(rows_, kTile); tile < own.begin; ++tile) Skip(stage);
    PipelineBarriers<1>& query_barriers = shared_.query_barriers[consumer_];
    query_barriers.WaitFilled(QueryStage());
    if constexpr (kIs8Bit<C>) {
      const float* factors = shared_.query_factors[consumer_];
      for (int r = 0; r < 2; ++r) softmax_.MultiplyScale(r, factors[RowOf(r)] * work_.k_scale);
    }
    if (rows_.begin < rows_.end) {
      tile = ComputeTiles(stage);
    } else {
      query_barriers.Free(QueryStage());
    }
    for (const Tiles all(item_, kTile); tile < all.end; ++tile) Skip(stage);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      item_.num_splits > 1 ? WritePartialResult(r) : WriteRow(r);
    }
  }

 private:
  __device__ __forceinline__ QueryState QueryStage() const { return QueryState::Of(work_.number); }

  // The tiles that hold positions of the consumer's rows. What they follow from is in shared
  // memory.
  __device__ __forceinline__ int32_t FirstTile() const { return rows_.begin / kTile; }
  __device__ __forceinline__ int32_t LastTile() const { return (rows_.end - 1) / kTile; }

  // Computes these tiles. Returns the tile after them.
  __device__ int32_t ComputeTiles(TileState* stage) {
    float logits[kTile / 8][4];
    uint32_t weights[kTile / 16][4];
    int32_t tile = FirstTile();
    for (; tile <= LastTile(); ++tile) {
      const int32_t count = CountPlainTurns(tile);
      if constexpr (kIs8Bit<C>) {
        // There are no registers for a loop of plain turns.
        if (count > 0) {
          TakePlainTurn(*stage, logits, weights);
        } else {
          TakeAnyTurn(tile, *stage, logits, weights);
        }
      } else {
        if (count > 0) TakePlainTurns(count, stage, logits, weights);
        tile += count;
        TakeAnyTurn(tile, *stage, logits, weights);
      }
      *stage = stage->Next();
    }
    if (WaitForValues(tile - 1, *stage)) {
      StartSums(*stage, weights);
      gpu::WaitProducts<0>(sums_);
    } else {
      AddOneByOne(tile - 1, *stage, weights);
    }
    FreeValues(*stage);
    return tile;
  }

  // How many plain turns there are from that of a tile on: all rows attend to all positions of the
  // tile and of the one before. The last turn is not one of them, although it may be so: after its
  // product the query is free.
  __device__ __forceinline__ int32_t CountPlainTurns(int32_t tile) const {
    const bool is_plain = FirstTile() < tile && common_.begin <= (tile - 1) * kTile;
    // With a cache of 8 bits each row has a scale of its own.
    const bool scale_late = kIs8Bit<C> ? work_.scale_late : softmax_.ScalesLate();
    if (!is_plain || !scale_late || Shared::KeysHoldValues(p_)) return 0;
    return max(0, min(common_.end / kTile, LastTile()) - tile);
  }

  // A turn starts the product with K of a tile, and that with V of the tile before it. It turns the
  // logits into weights.
  __device__ __forceinline__ void TakeAnyTurn(int32_t tile, TileState stage,
                                              float (&logits)[kTile / 8][4],
                                              uint32_t (&weights)[kTile / 16][4]) {
    float rescales[2];
    if (FirstTile() < tile && WaitForValues(tile - 1, stage)) {
      WaitForKeys(stage);
      WaitForTurn();
      StartLogits(stage, logits);
      StartSums(stage, weights);
      PassTurn();
      gpu::WaitProducts<1>(logits);
      FreeKeys(stage);
      if (tile == LastTile()) shared_.query_barriers[consumer_].Free(QueryStage());
      Weigh(tile, logits, rescales);
      gpu::KeepRegisters(logits);
      WaitForSums(rescales);
      gpu::KeepRegisters(weights);
      FreeValues(stage);
    } else {
      if (FirstTile() < tile) {
        AddOneByOne(tile - 1, stage, weights);
        FreeValues(stage);
      }
      WaitForKeys(stage);
      WaitForTurn();
      StartLogits(stage, logits);
      PassTurn();
      gpu::WaitProducts<0>(logits);
      FreeKeys(stage);
      if (tile == LastTile()) shared_.query_barriers[consumer_].Free(QueryStage());
      Weigh(tile, logits, rescales);
      Softmax::RescaleSums(rescales, sums_);
    }
    Pack(logits, weights);
  }

  // Turns with tiles of which all rows attend to all positions: the same without what masks and
  // other features need. Most turns of a long query are of this kind.
  __device__ __forceinline__ void TakePlainTurns(int32_t count, TileState* stage_of_first,
                                                 float (&logits)[kTile / 8][4],
                                                 uint32_t (&weights)[kTile / 16][4]) {
    TileState stage = *stage_of_first;
    count = gpu::Opaque(count);
#pragma unroll 1
    do {
      // The turns of a round through the places.
      const int end = gpu::Opaque(min(stage.index + count, Shared::kStages));
      count -= end - stage.index;
#pragma unroll 1
      do {
        TakePlainTurn(stage, logits, weights);
      } while (++stage.index != end);
      if (end == Shared::kStages) stage = {0, stage.phase ^ 1};
    } while (count != 0);
    *stage_of_first = stage;
  }

  __device__ __forceinline__ void TakePlainTurn(TileState stage, float (&logits)[kTile / 8][4],
                                                uint32_t (&weights)[kTile / 16][4]) {
    float rescales[2];
    shared_.keys_barriers.WaitFilled(stage);
    if (kIs8Bit<C>) {
      // V of the tile before is there, too: the same threads have filled it before.
    } else if (maps_.exist) {
      // Tensor copies bring whole tiles, in any order. What they write needs no fence.
      shared_.values_barriers.WaitFilled(stage);
    } else {
      // V of the tile before is there, too: an arrival counts all copies that began before.
      gpu::FenceAsyncProxy();
    }
    WaitForTurn();
    const Starts starts(*this, stage);
    StartLogits(starts, logits);
    StartSums(starts, kValuesBehindKeys, weights);
    PassTurn();
    gpu::WaitProducts<1>(logits);
    shared_.keys_barriers.FreeTogether(stage);
    Softmax::Powers powers = softmax_.FindLargest(logits, /*scales_late=*/true, rescales);
    powers.template Take<0, kTile / 16>(logits);
    gpu::KeepRegisters(logits);
    WaitForSums(rescales);
    gpu::KeepRegisters(weights);
    shared_.values_barriers.FreeTogether(stage);
    powers.template Take<kTile / 16, kTile / 8>(logits);
    softmax_.Add(powers, rescales);
    Pack(logits, weights);
  }

  // Waits for the product with the values, and rescales the sums. ptxas moves a wait up within its
  // basic block. Without the branch, no weights would be computed while the values are multiplied.
  __device__ __forceinline__ void WaitForSums(const float (&rescales)[2]) {
    if (Softmax::AnyRescales(rescales)) {
      gpu::WaitProducts<0>(sums_);
      Softmax::RescaleAll(rescales, sums_);
    } else {
      gpu::WaitProducts<0>(sums_);
    }
  }

  static __device__ __forceinline__ int Lane() { return threadIdx.x % gpu::kWarpSize; }

  // Consumers start products in turn, one turn for each KV tile of an item.
  __device__ void WaitForTurn() const { gpu::SyncThreads(turn_barrier_, kConsumers * kThreads); }
  __device__ void PassTurn() const {
    gpu::ArriveThreads(next_turn_barrier_, kConsumers * kThreads);
  }

  // With the fences that a tensor copy needs to fill the places next.
  __device__ void Skip(TileState* stage) {
    WaitForKeys(*stage);
    FreeKeys(*stage);
    *stage = stage->Next();
    if (!Shared::KeysHoldValues(p_)) WaitForValues(*stage);
    FreeValues(*stage);
    WaitForTurn();
    PassTurn();
  }

  // V of the tile before the one whose K has this stage.
  __device__ const Element* Values(TileState stage) const {
    return Shared::KeysHoldValues(p_) ? shared_.keys[stage.Previous().index]
                                      : shared_.values[stage.index];
  }
  __device__ void FreeKeys(TileState stage) {
    if (!Shared::KeysHoldValues(p_)) shared_.keys_barriers.Free(stage);
  }
  __device__ void FreeValues(TileState stage) {
    if (Shared::KeysHoldValues(p_)) {
      shared_.keys_barriers.Free(stage.Previous());
    } else {
      shared_.values_barriers.Free(stage);
    }
  }

  // The producer fences what it widens.
  static __device__ __forceinline__ void FenceCopies() {
    if constexpr (!kIs8Bit<C>) gpu::FenceAsyncProxy();
  }

  __device__ void WaitForKeys(TileState stage) {
    shared_.keys_barriers.WaitFilled(stage);
    FenceCopies();
  }

  __device__ void WaitForValues(TileState stage) {
    shared_.values_barriers.WaitFilled(stage);
    FenceCopies();
  }

  // Returns whether V of the tile may be multiplied: a weight of zero times an infinite or NaN
  // value would spoil the sum of a row that does not attend to it.
  __device__ bool WaitForValues(int32_t tile, TileState stage) {
    if (!Shared::KeysHoldValues(p_)) WaitForValues(stage);
    if (!common_.RowsDiffer(item_, tile * kTile, (tile + 1) * kTile)) return true;
    const Element* values = Values(stage);
    // Only the positions that some row leaves out, in steps of 16 rows of 64 columns.
    const int32_t from = tile * kTile;
    const bool left = common_.begin > max(item_.begin, from);
    const int first = left ? 0 : max(0, min(common_.end - from, kTile)) / 16 * 16;
    const int last = min((min(item_.end - from, kTile) + 15) / 16 * 16, kTile);
    NonFinite<Element> non_finite;
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
#pragma unroll 1
    for (int row = first; row < last; row += 16) {
#pragma unroll
      for (int block = 0; block < CacheRows::kChunks / 8; ++block) {
        non_finite.LookAt(values + block * CacheRows::kBlockElements +
                          row * CacheRows::kBlockColumns + thread * CacheRows::kChunk);
      }
    }
    const bool found = non_finite.IsFound();
    return !gpu::AnyInThreads(kThreadsBarrier + consumer_, kThreads, found);
  }

  // The descriptors of the query and of a place of K. A place of V is kValuesBehindKeys further.
  // ptxas computes them in uniform registers. It forgets in a loop what is uniform, so the turns
  // each say it again. One is grid.y for the query, and grid.z for K and V (AddToDescriptor).
  struct Starts {
    uint64_t query;
    uint64_t keys;

    __device__ __forceinline__ Starts(const PrefillConsumer& consumer, TileState stage)
        : query(QueryRows::Descriptor(gpu::Uniform(consumer.query_start_))),
          keys(CacheRows::Descriptor(
              gpu::Uniform(consumer.keys_start_ + stage.index * CacheRows::kUnits))) {}
  };
  static constexpr int kValuesBehindKeys = Shared::kStages * CacheRows::kUnits;

  __device__ __forceinline__ void StartLogits(TileState stage, float (&logits)[kTile / 8][4]) {
    StartLogits(Starts(*this, stage), logits);
  }
  __device__ __forceinline__ void StartSums(TileState stage, uint32_t (&weights)[kTile / 16][4]) {
    if (Shared::KeysHoldValues(p_)) {
      StartSums(Starts(*this, stage.Previous()), 0, weights);
    } else {
      StartSums(Starts(*this, stage), kValuesBehindKeys, weights);
    }
  }

  // Starts logits = q k^T.
  __device__ __forceinline__ void StartLogits(const Starts& starts, float (&logits)[kTile / 8][4]) {
    gpu::FenceProducts(logits);
#pragma unroll
    for (int column = 0; column < kHeadSize; column += 16) {
      gpu::StartProduct(logits, QueryRows::Columns(starts.query, column, gridDim.y),
                        CacheRows::Columns(starts.keys, column, gridDim.z),
                        /*accumulates=*/column > 0, Element{});
    }
    gpu::CommitProducts();
  }

  // Starts sums += weights * v. The place of V is `behind` units behind that of K.
  __device__ __forceinline__ void StartSums(const Starts& starts, int behind,
                                            uint32_t (&weights)[kTile / 16][4]) {
    gpu::KeepRegisters(weights);
    gpu::FenceProducts(sums_);
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
      for (int column = 0; column < kHeadSize; column += kColumns) {
        auto& sums = *reinterpret_cast<float(*)[kColumns / 8][4]>(sums_ + column / 8);
        gpu::StartProductTransposed(
            sums, weights[step], CacheRows::Rows(starts.keys, behind, step * 16, column, gridDim.z),
            Element{});
      }
    }
    gpu::CommitProducts();
  }

  // Turns the logits of a KV tile into weights.
  __device__ void Weigh(int32_t tile, float (&logits)[kTile / 8][4], float (&rescales)[2]) {
    const int32_t begin = tile * kTile, end = begin + kTile;
    softmax_.template ToLogits</*kSeldomBegins=*/!kIs8Bit<C>>(
        begin, /*masked=*/!common_.Contains(begin, end), logits);
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

  // The place of a row that exists. A division would take as long as 40 instructions.
  __device__ __forceinline__ RowPlace PlaceOf(int row) const {
    const uint32_t n = work_.head + row, token = p_.group.Quotient(n);
    const uint32_t head = (rows_.kv_head - token) * p_.group.number + n;
    return {work_.token + int64_t{token}, head};
  }
  __device__ __forceinline__ RowRange RangeOf(int row) const {
    if (row >= rows_.num_rows) return {};
    return RowRange::OfToken(p_, rows_, PlaceOf(row).token);
  }

  // Writes the lane's row r to the output.
  __device__ __forceinline__ void WriteRow(int r) {
    const RowState state = softmax_.State(r);
    const int row = RowOf(r);
    const bool exists = row < rows_.num_rows;
    float factor = 0;
    int64_t offset = 0;
    if (exists) {
      const RowPlace place = PlaceOf(row);
      offset = p_.OutputOffset(rows_.first_token + place.token, place.head);
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
    T* output = static_cast<T*>(p_.output) + offset;
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
    const RowPlace place = PlaceOf(row);
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
  const PrefillMaps& maps_;
  const Item& item_;
  const Item& rows_;  // the consumer's
  const PrefillWork& work_;
  Shared& shared_;
  const int consumer_;
  // Keeps what is the same for a warp in a register: ptxas would compute it in each turn. With a
  // cache of 8 bits there are no registers for that.
  static __device__ __forceinline__ uint32_t Kept(uint32_t number) {
    return kIs8Bit<C> ? number : gpu::Opaque(number);
  }
  const int turn_barrier_;
  const int next_turn_barrier_;
  const uint32_t query_start_;
  const uint32_t keys_start_;
  // With a cache of 8 bits there are no registers for a copy.
  const std::conditional_t<kIs8Bit<C>, const CommonRange&, CommonRange> common_;
  Softmax softmax_;
  float sums_[kHeadSize / 8][4] = {};  // laid out as logits, with columns in place of positions
};

}  // namespace xla_gpu::paged_attention
