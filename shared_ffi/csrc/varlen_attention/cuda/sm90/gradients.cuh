// The gradients of K and V, and those of the query, on sm_90a. What it adds to tensor_core.cuh:
//
// - A warpgroup of four warps, a consumer, multiplies 64 rows at a time and reads them and those of
//   a tile directly from shared memory. A thread block has two consumers: they own 128 positions,
//   or 128 query rows. Weights and gradients of logits go from registers into the next product.
// - A third warpgroup, the producer, finds the tiles of 64 query rows, or positions, and copies
//   them to shared memory. It runs ahead of the consumers by as many tiles as there is memory for,
//   across parts too. Each of its warps finds all tiles and copies 16 rows of them.
// - The consumers start their products in turn. While the tensor cores compute the products of one,
//   the other turns its logits into weights.
//
// The tensor cores add up the same products in the same order as in tensor_core.cuh: 16 columns,
// rows or positions at a time, from the first on.
//
// A place of a tile is filled by the threads of the producer, and freed by the warps of both
// consumers when the products of the next place are under way: those with its rows are complete
// then. Behind the last tile of a part is a place without rows, which says so. One comes before the
// first part.
#pragma once

#include "../../../paged_attention/cuda/pipeline.cuh"
#include "../../../paged_attention/cuda/products.cuh"
#include "../../../paged_attention/cuda/sm90/shared.cuh"
#include "../rows.cuh"

namespace xla_gpu::varlen_attention::sm90 {

using paged_attention::PipelineBarriers;
using paged_attention::PipelineState;
using paged_attention::SharedRows;
using paged_attention::WarpProducts;
using paged_attention::sm90::kConsumers;
using paged_attention::sm90::kThreadsBarrier;
using paged_attention::sm90::kTurnBarrier;
using paged_attention::sm90::SwizzledRows;

inline constexpr int kTileRows = 64;  // of a tile, and of a consumer
inline constexpr int kWarpgroup = 4 * gpu::kWarpSize;
inline constexpr int kConsumerThreads = kConsumers * kWarpgroup;
inline constexpr int kBlockThreads = kConsumerThreads + kWarpgroup;
inline constexpr int kWarpRows = 16;  // of a tile or a consumer, that a warp multiplies or copies
inline constexpr int kWarpgroupWarps = kTileRows / kWarpRows;
static_assert(kBlockTokens == kConsumers * kTileRows, "a thread block owns a block of positions");

// The warp's first row among those of all warps.
__device__ __forceinline__ int WarpRow() {
  return gpu::Opaque(threadIdx.x) / gpu::kWarpSize * kWarpRows;
}

// A tile in shared memory.
struct Tile {
  // kNone: there is none. kMasked: some row does not attend to all of it.
  enum Kind : int32_t { kNone, kWhole, kMasked };
  int32_t begin;  // the first position, or the first row
  Kind kind;
};

// Registers per thread, as in paged_attention's kernel.
struct Registers {
  static constexpr int kProducer = 40;
  static constexpr int kConsumer = 232;
};

template <typename T, int kHeadSize>
struct Shared {
  using Rows = SwizzledRows<T, kTileRows, kHeadSize>;
  static constexpr int kStages = 4;
  using Stage = PipelineState<kStages>;

  // Of K and V, or of the query and the output's gradient.
  alignas(1024) T own[kConsumers][2][Rows::kElements];
  alignas(1024) T tiles[kStages][2][Rows::kElements];
  // Of the query rows: those of the tiles, or the consumers' own.
  NumbersOfRows<kTileRows> numbers[kStages];
  PipelineBarriers<kStages> barriers;
  Tile tile[kStages];

  // One thread calls it. The producer's threads arrive after their copies, and one of each warp
  // after what the warp writes.
  __device__ void Init() {
    barriers.Init(kWarpgroup + kWarpgroupWarps, kConsumers * kWarpgroupWarps);
  }
};

// A warp begins to copy its rows of two arrays: those from first_row on. Eight lanes copy 128 bytes
// of a row. What does not exist becomes zeros.
template <int kHeadSize, typename T, typename ToRows>
__device__ __forceinline__ void CopyRowsOfWarp(const Params& p, int first_row,
                                               T (&to)[2][kTileRows * kHeadSize],
                                               const ToRows& to_rows) {
  using Rows = typename Shared<T, kHeadSize>::Rows;
  constexpr int kStep = gpu::kWarpSize / 8;
  const int lane = OwnLane(), row = lane / 8, chunk = lane % 8;
  uint64_t of_lane[2] = {};  // where the row of the lane begins in each array
  if (lane < kWarpRows) {
    to_rows(first_row + lane, [&](const T* first, const T* second) {
      of_lane[0] = reinterpret_cast<uint64_t>(first);
      of_lane[1] = reinterpret_cast<uint64_t>(second);
    });
  }
#pragma unroll
  for (int array = 0; array < 2; ++array) {
    const int64_t columns = array == 0 ? p.head_size : p.value_head_size;
    // Where a chunk lies among others repeats every eight rows.
    T* const places[2] = {to[array] + Rows::Offset(first_row + row, chunk),
                          to[array] + Rows::Offset(first_row + kStep + row, chunk)};
#pragma unroll
    for (int i = 0; i < kWarpRows; i += kStep) {
      const auto from = reinterpret_cast<const T*>(gpu::Shuffle(of_lane[array], i + row));
#pragma unroll
      for (int block = 0; block < Rows::kChunks / 8; ++block) {
        const int column = block * Rows::kBlockColumns + chunk * Rows::kChunk;
        gpu::CopyAsync16(
            places[i / kStep % 2] + i / 8 * 8 * Rows::kBlockColumns + block * Rows::kBlockElements,
            from + column, from != nullptr && column < columns);
      }
    }
  }
}

// A warp of the producer, which fills the places of tiles.
template <typename T, int kHeadSize>
class Producer {
  using Shared = sm90::Shared<T, kHeadSize>;

 public:
  __device__ explicit Producer(Shared* shared) : shared_(*shared) { End(); }
  __device__ ~Producer() {
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }

  // Fills the next place with rows, and calls also(numbers, row) for each.
  template <typename ToRows, typename Also>
  __device__ __forceinline__ void Fill(const Params& p, const Tile& tile, const ToRows& to_rows,
                                       const Also& also) {
    shared_.barriers.WaitFreed(stage_);
    const int first = WarpRow() % kTileRows, lane = OwnLane();
    CopyRowsOfWarp<kHeadSize>(p, first, shared_.tiles[stage_.index], to_rows);
    if (lane < kWarpRows) also(&shared_.numbers[stage_.index], first + lane);
    Say(tile);
  }

  // Says in the next place that no tile of a part follows.
  __device__ __forceinline__ void End() {
    shared_.barriers.WaitFreed(stage_);
    Say({0, Tile::kNone});
  }

  // Whether any(row) is true of any of kRows rows.
  template <int kRows, typename Any>
  static __device__ __forceinline__ bool AnyRow(const Any& any) {
    bool found = false;
    for (int row = OwnLane(); row < kRows; row += gpu::kWarpSize) found = found || any(row);
    return gpu::AnyInWarp(found);
  }

 private:
  __device__ __forceinline__ void Say(const Tile& tile) {
    gpu::Barrier* const filled = &shared_.barriers.filled[stage_.index];
    if (gpu::Opaque(threadIdx.x) == kConsumerThreads) shared_.tile[stage_.index] = tile;
    gpu::ArriveAfterCopies(filled);
    __syncwarp();
    if (OwnLane() == 0) gpu::Arrive(filled);
    stage_ = stage_.Next();
  }

  Shared& shared_;
  typename Shared::Stage stage_;
};

// A warpgroup that multiplies its 64 rows by those of the tiles. kSums: 1 for sums of gradients
// times the first array of a tile, 2 for those of weights times the second one, too.
template <typename T, int kHeadSize, int kSums>
class Consumer {
  using Shared = sm90::Shared<T, kHeadSize>;
  using Rows = typename Shared::Rows;
  using Products =
      WarpProducts<T, T, kHeadSize, kTileRows, SharedRows<T, kHeadSize>, SharedRows<T, kHeadSize>>;
  // With more columns of sums there are no registers for logits while weights are multiplied.
  static constexpr bool kWaitsForSums = kSums * kHeadSize > 128;

 public:
  using Logits = float[kTileRows / 8][4];
  using Packed = typename Products::PackedWeights;

  __device__ Consumer(Shared* shared, int number)
      : shared_(*shared),
        number_(number),
        own_start_(gpu::Opaque(Rows::StartOf(shared->own[number][0]))),
        tiles_start_(gpu::Opaque(Rows::StartOf(shared->tiles[0][0]))) {
    // The first turn is the first consumer's.
    if (number > 0) PassTurn();
  }
  // The second consumer has passed a turn too many.
  __device__ ~Consumer() {
    if (number_ == 0) WaitForTurn();
  }

  // Its first row among those of the thread block.
  __device__ __forceinline__ int FirstRow() const { return number_ * kTileRows; }
  __device__ __forceinline__ NumbersOfRows<kTileRows>& Numbers() {
    return shared_.numbers[number_];
  }

  // Copies the rows of the consumer, and what also(row) copies of each. Earlier products are
  // complete.
  template <typename ToRows, typename Also>
  __device__ __forceinline__ void CopyOwn(const Params& p, const ToRows& to_rows,
                                          const Also& also) {
    SyncWarpgroup();  // everyone has left the rows before
    const int first = WarpRow() % kTileRows, lane = OwnLane();
    CopyRowsOfWarp<kHeadSize>(p, first, shared_.own[number_],
                              [&](int row, const auto& use) { to_rows(FirstRow() + row, use); });
    if (lane < kWarpRows) also(first + lane);
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
    SyncWarpgroup();
  }

  // Multiplies the tiles of a part. weigh(tile, numbers, weights, gradients) turns the products
  // with the first array of a tile into weights, and those with the second one into gradients.
  template <typename Weigh>
  __device__ __forceinline__ void Multiply(const Weigh& weigh) {
#pragma unroll
    for (int i = 0; i < kSums * kHeadSize / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums_[i / (kHeadSize / 8)][i % (kHeadSize / 8)][e] = 0;
    }
    Packed weights = {}, gradients = {};
    WaitForTurn();
    for (;;) {
      shared_.barriers.WaitFilled(stage_);
      const Tile tile = shared_.tile[stage_.index];
      if (tile.kind == Tile::kNone) break;
      gpu::FenceAsyncProxy();
      if constexpr (kWaitsForSums) WaitForSums(weights, gradients);
      Logits of_weights, of_gradients;
      StartLogits(of_weights, of_gradients);
      PassTurn();
      gpu::WaitProducts<0>(of_weights);
      gpu::KeepRegisters(of_gradients);
      if constexpr (!kWaitsForSums) WaitForSums(weights, gradients);
      shared_.barriers.FreeTogether(stage_.Previous());
      weigh(tile, shared_.numbers[stage_.index], of_weights, of_gradients);
      if constexpr (kSums == 2) Products::template PackWeights<T>(of_weights, weights);
      Products::template PackWeights<T>(of_gradients, gradients);
      WaitForTurn();
      StartSums(weights, gradients);
      stage_ = stage_.Next();
    }
    PassTurn();
    WaitForSums(weights, gradients);
    shared_.barriers.FreeTogether(stage_.Previous());
    stage_ = stage_.Next();
  }

  // Of gradients, and of weights.
  __device__ __forceinline__ const auto& SumsOfGradients() const { return sums_[0]; }
  __device__ __forceinline__ const auto& SumsOfWeights() const { return sums_[kSums - 1]; }

 private:
  // Consumers start the products with a tile in turn: those that add up the tile before, and those
  // of logits.
  __device__ __forceinline__ void WaitForTurn() const {
    gpu::SyncThreads(kTurnBarrier + number_, kConsumerThreads);
  }
  __device__ __forceinline__ void PassTurn() const {
    gpu::ArriveThreads(kTurnBarrier + 1 - number_, kConsumerThreads);
  }

  __device__ __forceinline__ void SyncWarpgroup() const {
    gpu::SyncThreads(kThreadsBarrier + number_, kWarpgroup);
  }

  // The descriptors of the two arrays of the consumer's rows, or of a tile. See sm90/consumer.cuh
  // of paged_attention.
  static __device__ __forceinline__ uint64_t First(uint32_t start) {
    return Rows::Descriptor(gpu::Uniform(start));
  }
  static __device__ __forceinline__ uint64_t Second(uint32_t start) {
    return Rows::Descriptor(gpu::Uniform(start) + Rows::kUnits);
  }
  __device__ __forceinline__ uint32_t TileStart() const {
    return tiles_start_ + stage_.index * 2 * Rows::kUnits;
  }

  // Starts the products of the consumer's rows and those of a tile.
  __device__ __forceinline__ void StartLogits(Logits& of_weights, Logits& of_gradients) const {
    gpu::KeepRegisters(of_gradients);
    gpu::FenceProducts(of_weights);
    StartLogits(First(own_start_), First(TileStart()), of_weights);
    StartLogits(Second(own_start_), Second(TileStart()), of_gradients);
    gpu::CommitProducts();
  }
  static __device__ __forceinline__ void StartLogits(uint64_t own, uint64_t tile, Logits& logits) {
#pragma unroll
    for (int column = 0; column < kHeadSize; column += 16) {
      gpu::StartProduct(logits, Rows::Columns(own, column, gpu::One<0>()),
                        Rows::Columns(tile, column, gpu::One<1>()), /*accumulates=*/column > 0,
                        T{});
    }
  }

  // Starts the products that are added up.
  __device__ __forceinline__ void StartSums(Packed& weights, Packed& gradients) {
    gpu::KeepRegisters(weights);
    gpu::KeepRegisters(gradients);
    gpu::KeepRegisters(sums_[0]);
    gpu::FenceProducts(sums_[kSums - 1]);
    if constexpr (kSums == 2) StartSums(Second(TileStart()), weights, sums_[1]);
    StartSums(First(TileStart()), gradients, sums_[0]);
    gpu::CommitProducts();
  }
  static __device__ __forceinline__ void StartSums(uint64_t tile, Packed& packed,
                                                   float (&sums)[kHeadSize / 8][4]) {
#pragma unroll
    for (int step = 0; step < kTileRows / 16; ++step) {
      gpu::StartProductTransposed(sums, packed[step],
                                  Rows::Rows(tile, 0, step * 16, 0, gpu::One<1>()), T{});
    }
  }
  __device__ __forceinline__ void WaitForSums(Packed& weights, Packed& gradients) {
    gpu::WaitProducts<0>(sums_[0]);
    if constexpr (kSums == 2) gpu::KeepRegisters(sums_[1]);
    gpu::KeepRegisters(weights);
    gpu::KeepRegisters(gradients);
  }

  Shared& shared_;
  const int number_;
  const uint32_t own_start_;
  const uint32_t tiles_start_;
  typename Shared::Stage stage_ = typename Shared::Stage().Next();  // the first says nothing
  float sums_[kSums][kHeadSize / 8][4];
};

// The gradients of K and V of a block of positions of a kv head.
template <typename T, int kHeadSize, bool kGeneral>
class KeyGradients : AttendedPositions<kTileRows, kGeneral> {
  using Base = AttendedPositions<kTileRows, kGeneral>;
  using Base::b_, Base::begin_, Base::kv_head_, Base::p_, Base::scratch_;
  using Base::From, Base::Queries;

 public:
  static constexpr bool kFromLast = false;
  static constexpr int kSums = 2;
  static __host__ __device__ int64_t PartsOfBlock(const Params&) { return 1; }

  __device__ KeyGradients(const BackwardParams& b, const BackwardScratch& scratch,
                          const TokenBlock& block, int32_t, int32_t kv_head)
      : Base(b, scratch, block, kv_head, block.begin, kBlockTokens) {}

  __device__ __forceinline__ void Produce(Producer<T, kHeadSize>* producer) {
    do {
      const Tiles tiles = this->TilesOfQueries();
      for (int32_t tile = Next(tiles.begin, tiles.end); tile < tiles.end;
           tile = Next(tile + 1, tiles.end)) {
        const int32_t first = tile * kTileRows;
        const bool is_masked = this->IsMasked(tile);
        producer->Fill(p_, {first, is_masked ? Tile::kMasked : Tile::kWhole},
                       QueryRows<T>{b_, Queries(), kv_head_, first},
                       [&](NumbersOfRows<kTileRows>* numbers, int row) {
                         numbers->template Copy<kGeneral>(p_, scratch_, Queries(), kv_head_, first,
                                                          row, is_masked);
                       });
      }
    } while (this->NextQueries());
    producer->End();
  }

  __device__ __forceinline__ void Consume(Consumer<T, kHeadSize, kSums>* consumer) const {
    consumer->CopyOwn(p_,
                      PositionRows<T, false>{p_, scratch_.lengths, this->block_, kv_head_, From()},
                      [](int) {});
    consumer->Multiply([&](const Tile& tile, const auto& numbers, auto& weights, auto& gradients) {
      const int32_t first = From() + WarpRow();
      if (tile.kind == Tile::kMasked) {
        WeighPositions<kGeneral, true>(p_, numbers, first, weights, gradients);
      } else {
        WeighPositions<kGeneral, false>(p_, numbers, first, weights, gradients);
      }
    });
    const int32_t first = begin_ + WarpRow();
    this->template WritePositions<T>(first, 0, consumer->SumsOfGradients(), p_.scale, b_.dkey,
                                     p_.head_size);
    this->template WritePositions<T>(first, 0, consumer->SumsOfWeights(), 1, b_.dvalue,
                                     p_.value_head_size);
  }

 private:
  __device__ __forceinline__ int32_t Next(int32_t tile, int32_t end) const {
    return NextTile(p_, tile, end, [&](int32_t tile) {
      return Producer<T, kHeadSize>::template AnyRow<kTileRows>(
          [&](int row) { return this->Meets(tile, row); });
    });
  }
};

// The gradients of the query of as many rows of a kv head.
template <typename T, int kHeadSize, bool kGeneral>
class QueryGradients : OwnedRows<kBlockTokens, kGeneral> {
  using Base = OwnedRows<kBlockTokens, kGeneral>;
  using Base::b_, Base::block_, Base::first_row_, Base::kv_head_, Base::p_, Base::scratch_;

 public:
  static constexpr bool kFromLast = true;
  static constexpr int kSums = 1;
  static __host__ __device__ int64_t PartsOfBlock(const Params& p) { return p.group.number; }

  __device__ QueryGradients(const BackwardParams& b, const BackwardScratch& scratch,
                            const TokenBlock& block, int32_t part, int32_t kv_head)
      : Base(b, scratch, block, part, kv_head) {}

  __device__ __forceinline__ void Produce(Producer<T, kHeadSize>* producer) {
    if (!this->Exist()) return;
    const Tiles tiles = this->template TilesOfPositions<kTileRows>();
    for (int32_t tile = Next(tiles.begin, tiles.end); tile < tiles.end;
         tile = Next(tile + 1, tiles.end)) {
      const int32_t first = tile * kTileRows;
      const bool is_masked = this->IsMasked(first, first + kTileRows);
      producer->Fill(p_, {first, is_masked ? Tile::kMasked : Tile::kWhole},
                     PositionRows<T, kGeneral>{p_, scratch_.lengths, block_, kv_head_, first},
                     [](NumbersOfRows<kTileRows>*, int) {});
    }
    producer->End();
  }

  __device__ __forceinline__ void Consume(Consumer<T, kHeadSize, kSums>* consumer) const {
    if (!this->Exist()) return;
    NumbersOfRows<kTileRows>& numbers = consumer->Numbers();
    consumer->CopyOwn(p_, QueryRows<T>{b_, block_, kv_head_, first_row_}, [&](int row) {
      numbers.template Copy<kGeneral>(p_, scratch_, block_, kv_head_,
                                      first_row_ + consumer->FirstRow(), row, true);
    });
    float slopes[2] = {};
    consumer->Multiply([&](const Tile& tile, const auto&, auto& weights, auto& gradients) {
      const int first = WarpRow() % kTileRows + OwnLane() / 4;
      if (tile.kind == Tile::kMasked) {
        Weigh<true>(tile.begin, numbers, first, weights, gradients, slopes);
      } else {
        Weigh<false>(tile.begin, numbers, first, weights, gradients, slopes);
      }
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t number = first_row_ + WarpRow() + OwnLane() / 4 + 8 * r;
      this->template WriteRow<T>(number, r, consumer->SumsOfGradients(), slopes[r]);
    }
  }

 private:
  __device__ __forceinline__ int32_t Next(int32_t tile, int32_t end) const {
    return NextTile(p_, tile, end, [&](int32_t tile) {
      return Producer<T, kHeadSize>::template AnyRow<kBlockTokens>(
          [&](int row) { return this->template Meets<kTileRows>(tile, row); });
    });
  }

  template <bool kMasked, typename Logits>
  __device__ __forceinline__ void Weigh(int32_t begin, const NumbersOfRows<kTileRows>& numbers,
                                        int first, Logits& weights, Logits& gradients,
                                        float (&slopes)[2]) const {
    const Weigher<kGeneral> weigher(p_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + 8 * r;
      RowMask mask = {};
      RowBias bias = {};
      if constexpr (kMasked) mask = numbers.masks[row];
      if constexpr (kGeneral) bias = numbers.biases[row];
      WeighRow<kMasked>(weigher, numbers.rows[row], mask, bias, begin, r, weights, gradients,
                        &slopes[r]);
    }
  }
};

// Computes the parts of a thread block. Gradients: one of the two classes.
template <typename T, int kHeadSize, bool kGeneral, typename Gradients>
__device__ __forceinline__ void ComputeParts(const BackwardParams& b,
                                             const BackwardScratch& scratch) {
  auto* const shared = reinterpret_cast<Shared<T, kHeadSize>*>(gpu::SharedMemory());
  if (gpu::Opaque(threadIdx.x) == 0) shared->Init();
  __syncthreads();
  const int warpgroup = gpu::Shuffle(static_cast<int>(threadIdx.x / kWarpgroup), 0);  // uniform
  const auto for_parts = [&](const auto& use) {
    ForParts<Gradients::kFromLast, kGeneral>(
        b.forward, scratch.lengths, Gradients::PartsOfBlock(b.forward),
        [&](const TokenBlock& block, int32_t part, int32_t kv_head) {
          Gradients gradients(b, scratch, block, part, kv_head);
          use(&gradients);
        });
  };
  if (warpgroup == kConsumers) {
    gpu::GiveRegistersBack<Registers::kProducer>();
    Producer<T, kHeadSize> producer(shared);
    for_parts([&](Gradients* gradients) { gradients->Produce(&producer); });
  } else {
    gpu::TakeRegisters<Registers::kConsumer>();
    Consumer<T, kHeadSize, Gradients::kSums> consumer(shared, warpgroup);
    for_parts([&](Gradients* gradients) { gradients->Consume(&consumer); });
  }
}

template <typename T, int kHeadSize, bool kGeneral>
__global__ void __launch_bounds__(kBlockThreads, 1)
    HopperKeyGradients(BackwardParams b, BackwardScratch scratch) {
  ComputeParts<T, kHeadSize, kGeneral, KeyGradients<T, kHeadSize, kGeneral>>(b, scratch);
}

template <typename T, int kHeadSize, bool kGeneral>
__global__ void __launch_bounds__(kBlockThreads, 1)
    HopperQueryGradients(BackwardParams b, BackwardScratch scratch) {
  ComputeParts<T, kHeadSize, kGeneral, QueryGradients<T, kHeadSize, kGeneral>>(b, scratch);
}

}  // namespace xla_gpu::varlen_attention::sm90
