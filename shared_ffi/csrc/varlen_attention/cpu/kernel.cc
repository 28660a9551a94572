// The CPU kernel of the derivative, compiled once for each instruction set.
//
// For some KV tiles of 64 positions: pack K and V; then for each tile of query rows, token after
// token and head after head, and each of the KV tiles: the products q . k and dout . v by the
// forward's qk.h, the weights and their derivatives (weights.h), and three sums of products
// (outer_products.h).
//
// A gradient is a sum over tiles, of each tile's sum over rows or positions, all in their order.
// Tiles are counted from a sequence's first token, whatever an item has of them. Sequences that
// continue each other come one after the other, in the order of their numbers. So the bits depend
// on these sequences alone: neither on the batch nor on how the work is cut. The products q . k
// have the bits of the forward.
#include "kernel.h"

#include "../../paged_attention/cpu/qk.h"
#include "outer_products.h"
#include "weights.h"

namespace xla_gpu::varlen_attention {
namespace {

using paged_attention::CachedRows;
using paged_attention::CeilDiv;
using paged_attention::ForEachBlock;
using paged_attention::PackedKeys;
using paged_attention::RoundUp;

static_assert(kTilePositions == kMaxTile);

// Rows of an array as floats, padded with zeros to whole vectors: [rows, width].
class WideRows {
 public:
  WideRows(int64_t columns, int64_t num_rows, Arena* arena)
      : columns_(columns),
        width_(RoundUp(columns, kLanes)),
        rows_(arena->Take<float>(num_rows * width_)) {}

  int64_t width() const { return width_; }
  float* Row(int64_t row) { return rows_ + row * width_; }

  void Clear(int64_t first, int64_t end) {
    std::memset(Row(first), 0, (end - first) * width_ * sizeof(float));
  }

  // Loads `count` rows, from row `to` on.
  template <typename T>
  void Load(const T* const* rows, int64_t count, int64_t to = 0) {
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t d = 0; d < width_; d += kLanes) {
        Store(LoadWide(rows[row] + d, columns_ - d), Row(to + row) + d);
      }
    }
  }

 private:
  const int64_t columns_;
  const int64_t width_;
  float* const rows_;
};

// The rows of a query tile, of query or of dout: as floats, and as Dot<T> multiplies them.
template <typename T>
class QueryRows {
 public:
  QueryRows(int64_t columns, int64_t num_rows, Arena* arena)
      : columns_(columns),
        wide_(columns, num_rows, arena),
        across_width_(RoundUp(CeilDiv(columns, Dot<T>::kPerLane), kLanes)),
        across_(kIsWide ? wide_.Row(0) : arena->Take<float>(num_rows * across_width_)) {}

  WideRows& wide() { return wide_; }
  int64_t across_width() const { return across_width_; }
  const float* Across(int64_t row) const { return across_ + row * across_width_; }

  // `count` rows; the others, up to num_rows, are zero.
  void Load(const T* const* rows, int64_t count, int64_t num_rows) {
    wide_.Load(rows, count);
    wide_.Clear(count, num_rows);
    if constexpr (kIsWide) return;
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t w = 0; w < across_width_; w += kLanes) {
        const int64_t d = w * Dot<T>::kPerLane;
        Lanes vector = {};
        if (row < count) Dot<T>::LoadQuery(rows[row] + d, columns_ - d, &vector);
        Store(vector, across_ + row * across_width_ + w);
      }
    }
  }

 private:
  static constexpr bool kIsWide = Dot<T>::kPerLane == 1;
  static_assert(Dot<T>::kAcross == 1);

  const int64_t columns_;
  WideRows wide_;
  const int64_t across_width_;
  float* const across_;
};

template <typename T>
class Differentiation {
 public:
  Differentiation(const BackwardParams& b, const WorkItem& item, const RowSums& numbers,
                  Arena* arena)
      : b_(b),
        p_(b.forward),
        item_(item),
        group_(p_.group.number),
        tile_tokens_(TileTokens(p_)),
        queries_(p_.head_size, PaddedRows(tile_tokens_), arena),
        douts_(p_.value_head_size, PaddedRows(tile_tokens_), arena),
        num_tiles_(TilesAtOnce()),
        keys_(p_.head_size, queries_.across_width(), num_tiles_, arena),
        values_(p_.value_head_size, douts_.across_width(), num_tiles_, arena),
        wide_keys_(p_.head_size, num_tiles_ * kMaxTile, arena),
        dkey_(p_.head_size, num_tiles_ * kMaxTile, arena),
        dvalue_(p_.value_head_size, num_tiles_ * kMaxTile, arena),
        key_rows_(arena->Take<const T*>(kMaxTile)),
        value_rows_(arena->Take<const T*>(kMaxTile)),
        query_rows_(arena->Take<const T*>(tile_tokens_ * group_)),
        dout_rows_(arena->Take<const T*>(tile_tokens_ * group_)),
        weights_(b, item, numbers, tokens_, PaddedRows(tile_tokens_), arena),
        tiles_(arena->Take<QueryTile>(NumQueryTiles())) {}

  void Run() {
    FindQueryTiles();
    if (item_.has_dquery) {
      std::memset(item_.dquery, 0, num_rows_ * dkey_.width() * sizeof(float));
    }
    for (const int64_t sequence : item_.keys) {
      const Span positions = Cut(item_.positions, sequence);
      for (int64_t at = positions.begin; at < positions.end; at += num_tiles_ * kMaxTile) {
        AddTiles(sequence, {at, Smaller(at + num_tiles_ * kMaxTile, positions.end)});
      }
    }
    ForEachQueryTile([&](const QueryTile& tile) {
      if (item_.has_dquery) WriteQueries(tile);
      if (!item_.has_delta || tile.attended.IsEmpty()) return;
      Select(tile);
      weights_.FinishDelta(tile.tokens.begin, tile.tokens.end);
    });
  }

 private:
  struct QueryTile {
    int64_t sequence;
    Span tokens;    // of the sequence
    Span attended;  // from the first to the last position that they attend to
    int64_t row;    // the first in the item's dquery
  };

  // What a sequence has of a work item's tokens or positions.
  Span Cut(const Span& span, int64_t sequence) const {
    return {span.begin, Smaller(span.end, p_.QueryLen(sequence))};
  }
  int64_t NumQueryTiles() const {
    int64_t count = 0;
    for (const int64_t sequence : item_.queries) {
      const Span tokens = Cut(item_.tokens, sequence);
      count += CeilDiv(tokens.end - tokens.begin, tile_tokens_);
    }
    return count;
  }
  void FindQueryTiles() {
    for (const int64_t sequence : item_.queries) {
      const Span tokens = Cut(item_.tokens, sequence);
      for (int64_t i = tokens.begin; i < tokens.end; i += tile_tokens_) {
        QueryTile& tile = tiles_[num_query_tiles_++];
        tile = {sequence, {i, Smaller(i + tile_tokens_, tokens.end)}, {}, num_rows_};
        num_rows_ += (tile.tokens.end - i) * group_;
        Select(tile);
        tile.attended = p_.AttendedByAny(tokens_, i, tile.tokens.end - 1);
        if (!item_.has_delta) continue;
        if (tile.attended.end - tile.attended.begin > kMostSummed) tile.attended = {0, 0};
        if (!tile.attended.IsEmpty()) weights_.ClearDelta(i, tile.tokens.end);
      }
    }
  }
  template <typename Function>
  void ForEachQueryTile(const Function& function) const {
    for (int64_t n = 0; n < num_query_tiles_; ++n) function(tiles_[n]);
  }
  void Select(const QueryTile& tile) { tokens_ = p_.QueryTokensOf(tile.sequence); }

  // KV tiles that the rows of a query tile attend to at a time: packed, and with their sums, they
  // fit a core's cache.
  int64_t TilesAtOnce() const {
    constexpr int64_t kBytes = 1 << 19, kMostTiles = 8;
    const int64_t bytes = kMaxTile * (3 * p_.head_size + 2 * p_.value_head_size) * 4;
    int64_t most = 0;  // tiles of a sequence
    for (const int64_t sequence : item_.keys) {
      const Span positions = Cut(item_.positions, sequence);
      most = Larger(most, CeilDiv(positions.end - positions.begin, kMaxTile));
    }
    return Larger(1, Smaller(Smaller(kMostTiles, kBytes / bytes), most));
  }
  // Rows in whole blocks.
  int64_t PaddedRows(int64_t num_tokens) const { return RoundUp(num_tokens * group_, kBlockRows); }

  // Adds all that has to do with K and V of some tokens of a sequence, some KV tiles.
  void AddTiles(int64_t sequence, const Span& tokens) {
    const QueryTokens of_keys = p_.QueryTokensOf(sequence);
    const auto attends = [&](const QueryTile& tile, int64_t begin, int64_t end) {
      return tile.attended.begin < of_keys.Position(end) &&
             of_keys.Position(begin) < tile.attended.end;
    };
    bool is_packed = false;
    dkey_.Clear(0, num_tiles_ * kMaxTile);
    dvalue_.Clear(0, num_tiles_ * kMaxTile);
    ForEachQueryTile([&](const QueryTile& tile) {
      if (!attends(tile, tokens.begin, tokens.end)) return;
      if (!p_.Continues(tile.sequence, sequence)) return;
      for (int64_t at = tokens.begin; !is_packed && at < tokens.end; at += kMaxTile) {
        PackTile((at - tokens.begin) / kMaxTile, of_keys.first + at,
                 Smaller(kMaxTile, tokens.end - at));
      }
      is_packed = true;
      Select(tile);
      LoadRows(tile.tokens);
      for (int64_t at = tokens.begin; at < tokens.end; at += kMaxTile) {
        const int64_t count = Smaller(kMaxTile, tokens.end - at);
        if (attends(tile, at, at + count)) {
          AddTile((at - tokens.begin) / kMaxTile, of_keys.Position(at), count, tile);
        }
      }
    });
    if (item_.has_dkey) WriteKeys(of_keys.first + tokens.begin, tokens.end - tokens.begin);
  }

  // Packs `count` tokens from `first` on. The last one's row is repeated after it: no row attends
  // there.
  void PackTile(int64_t tile, int64_t first, int64_t count) {
    const auto& cache = p_.cache;
    for (int64_t j = 0; j < kMaxTile; ++j) {
      const int64_t offset = cache.Offset(first + Smaller(j, count - 1), 0);
      key_rows_[j] = static_cast<const T*>(cache.keys) + offset + item_.kv_head * cache.head_stride;
      value_rows_[j] = static_cast<const T*>(cache.values) + cache.OffsetOfValue(offset) +
                       item_.kv_head * cache.value_head_stride;
    }
    const auto places = [](const T** rows) {
      return CachedRows<T>{{reinterpret_cast<const char* const*>(rows), 0}};
    };
    keys_.Select(tile);
    keys_.Pack(places(key_rows_), {0, kMaxTile});
    values_.Select(tile);
    values_.Pack(places(value_rows_), {0, kMaxTile});
    if (item_.has_dquery) wide_keys_.Load(key_rows_, kMaxTile, tile * kMaxTile);
  }

  // Loads the query tile of some tokens.
  void LoadRows(const Span& tokens) {
    const int64_t first_head = item_.kv_head * group_;
    int64_t row = 0;
    for (int64_t i = tokens.begin; i < tokens.end; ++i) {
      const int64_t token = tokens_.first + i;
      const T* query = static_cast<const T*>(p_.query) + p_.QueryOffset(token, first_head);
      const T* dout =
          static_cast<const T*>(b_.dout) + token * b_.dout_stride + first_head * p_.value_head_size;
      for (int64_t h = 0; h < group_; ++h, ++row) {
        query_rows_[row] = query + h * p_.head_size;
        dout_rows_[row] = dout + h * p_.value_head_size;
      }
    }
    queries_.Load(query_rows_, row, RoundUp(row, kBlockRows));
    douts_.Load(dout_rows_, row, RoundUp(row, kBlockRows));
  }

  // The loaded rows and the KV tile of `count` positions at this one.
  void AddTile(int64_t tile, int64_t at, int64_t count, const QueryTile& rows) {
    const int64_t num_tokens = rows.tokens.end - rows.tokens.begin;
    const int64_t num_rows = PaddedRows(num_tokens), first_sum = tile * kMaxTile;
    weights_.SetRows(at, count, rows.tokens.begin, num_tokens, num_rows);
    keys_.Select(tile);
    Multiply(queries_, keys_, num_rows, weights_.weights());
    values_.Select(tile);
    Multiply(douts_, values_, num_rows, weights_.dlogits());
    if (item_.has_delta) return weights_.AddToDelta();
    weights_.Apply();
    if (item_.has_dquery) {
      float* const dquery = item_.dquery + rows.row * dkey_.width();
      // Rows past the tokens have no sums.
      ForEachBlock<kBlockRows>(0, num_tokens * group_, [&](auto size, int64_t first) {
        AddOuterProducts<size, false>(weights_.dlogits() + first * kMaxTile,
                                      weights_.PositionsOf(first, size), wide_keys_.Row(first_sum),
                                      dkey_.width(), dquery + first * dkey_.width());
      });
    }
    if (!item_.has_dkey) return;
    ForEachBlock<kBlockRows>(0, count, [&](auto size, int64_t first) {
      const Span range = weights_.RowsOf(first, size);
      AddOuterProducts<size, true>(weights_.weights() + first, range, douts_.wide().Row(0),
                                   dvalue_.width(), dvalue_.Row(first_sum + first));
      AddOuterProducts<size, true>(weights_.dlogits() + first, range, queries_.wide().Row(0),
                                   dkey_.width(), dkey_.Row(first_sum + first));
    });
  }

  // products[row, j] of the rows with the KV tile, [rows, kMaxTile].
  void Multiply(const QueryRows<T>& rows, const PackedKeys<T>& k, int64_t num_rows,
                float* products) const {
    const int64_t width = rows.across_width();
    paged_attention::Prefetcher nothing;
    for (int64_t first = 0; first < num_rows; first += kBlockRows) {
      const Span range = weights_.PositionsOf(first, kBlockRows);
      if (range.IsEmpty()) continue;
      ForEachBlock<kBlockVectors>(
          range.begin / kLanes, CeilDiv(range.end, kLanes), [&](auto size, int64_t vector) {
            paged_attention::MultiplyPacked<kBlockRows, size, T>(
                rows.Across(first), k.At(vector * kLanes), width,
                products + first * kMaxTile + vector * kLanes, /*num_read=*/0, &nothing);
          });
    }
  }

  // Writes sums times a factor. Adding 0 turns -0 into 0.
  static void Write(const float* sums, int64_t columns, float factor, T* to) {
    for (int64_t d = 0; d < columns; d += kLanes) {
      StoreNarrow(Load<Lanes>(sums + d) * factor + 0.0f, to + d, columns - d);
    }
  }

  // Writes the gradients of K and V of `count` tokens from `first` on.
  void WriteKeys(int64_t first, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = (first + j) * p_.num_kv_heads + item_.kv_head;
      Write(dkey_.Row(j), p_.head_size, p_.scale, static_cast<T*>(b_.dkey) + row * p_.head_size);
      Write(dvalue_.Row(j), p_.value_head_size, 1,
            static_cast<T*>(b_.dvalue) + row * p_.value_head_size);
    }
  }

  void WriteQueries(const QueryTile& tile) const {
    const float* sums = item_.dquery + tile.row * dkey_.width();
    const int64_t first = p_.query_start_loc[tile.sequence];
    for (int64_t i = tile.tokens.begin; i < tile.tokens.end; ++i) {
      for (int64_t h = 0; h < group_; ++h, sums += dkey_.width()) {
        const int64_t row = (first + i) * p_.num_heads + item_.kv_head * group_ + h;
        Write(sums, p_.head_size, p_.scale, static_cast<T*>(b_.dquery) + row * p_.head_size);
      }
    }
  }

  const BackwardParams& b_;
  const Params& p_;
  const WorkItem& item_;
  QueryTokens tokens_ = {};  // of a query tile's sequence
  const int64_t group_;
  const int64_t tile_tokens_;
  QueryRows<T> queries_;
  QueryRows<T> douts_;
  const int64_t num_tiles_;  // at once
  PackedKeys<T> keys_;
  PackedKeys<T> values_;
  WideRows wide_keys_;
  WideRows dkey_;
  WideRows dvalue_;
  const T** const key_rows_;    // of a KV tile
  const T** const value_rows_;  // of a KV tile
  const T** const query_rows_;  // of a query tile
  const T** const dout_rows_;   // of a query tile
  Weights weights_;
  QueryTile* const tiles_;
  int64_t num_query_tiles_ = 0;
  int64_t num_rows_ = 0;  // of all query tiles
};

void SumRows(const BackwardParams& b, int64_t first, int64_t end, const RowSums& numbers) {
  WithTensorType(b.forward.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t num_heads = b.forward.num_heads, columns = b.forward.value_head_size;
    for (int64_t token = first; token < end; ++token) {
      for (int64_t head = 0; head < num_heads; ++head) {
        const T* const output = static_cast<const T*>(b.output) + token * b.output_stride;
        const T* const dout = static_cast<const T*>(b.dout) + token * b.dout_stride;
        Lanes sum = {};
        for (int64_t d = head * columns; d < (head + 1) * columns; d += kLanes) {
          const int64_t count = (head + 1) * columns - d;
          sum = MultiplyAdd(LoadWide(output + d, count), LoadWide(dout + d, count), sum);
        }
        numbers.delta[token * num_heads + head] = SumOfLanes(sum);
      }
    }
  });
}

int64_t DqueryColumns(const Params& p) { return RoundUp(p.head_size, kLanes); }

void Run(const BackwardParams& b, const WorkItem& item, const RowSums& numbers, Arena* arena) {
  WithTensorType(b.forward.dtype, [&](auto type) {
    Differentiation<decltype(type)>(b, item, numbers, arena).Run();
  });
}

}  // namespace

#define XLA_GPU_NAME_OF_KERNEL(instruction_set) kBackwardKernel_##instruction_set
#define XLA_GPU_KERNEL(instruction_set) XLA_GPU_NAME_OF_KERNEL(instruction_set)
#define XLA_GPU_STRING_OF(x) #x
#define XLA_GPU_STRING(x) XLA_GPU_STRING_OF(x)

extern const BackwardKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET);
const BackwardKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET) = {
    XLA_GPU_STRING(XLA_GPU_INSTRUCTION_SET), SumRows, DqueryColumns, Run};

}  // namespace xla_gpu::varlen_attention
