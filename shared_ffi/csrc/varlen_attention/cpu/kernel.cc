// The CPU kernel of the derivative, compiled once for each instruction set.
//
// For each KV tile of 64 positions: pack K and V; then for each tile of query rows, token after
// token and head after head: the products q . k and dout . v by the forward's qk.h, the weights and
// their derivatives (weights.h), and three sums of products (outer_products.h).
//
// Each number of a gradient is one chain of additions, over rows or over positions in their order,
// counted from the sequence's first. So its bits depend on the sequence alone: neither on the batch
// nor on how the work is cut. The products q . k have the bits of the forward.
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

// Floats of a row that is multiplied across, and of one whose columns are added up.
template <typename T>
int64_t AcrossWidth(int64_t columns) {
  return RoundUp(CeilDiv(columns, Dot<T>::kPerLane), Dot<T>::kAcross * kLanes);
}
template <typename T>
int64_t DownWidth(int64_t columns) {
  return RoundUp(columns, Dot<T>::kDown * kLanes);
}

// Rows of a tile in both forms that products need: across, [rows, AcrossWidth], and down,
// [rows / kPerLane, DownWidth]. They are one where a lane holds one number.
template <typename T>
class PackedRows {
 public:
  // `num_rows`: at most, a multiple of kPerLane.
  PackedRows(int64_t columns, int64_t num_rows, Arena* arena)
      : columns_(columns),
        across_width_(AcrossWidth<T>(columns)),
        down_width_(DownWidth<T>(columns)),
        zeros_(arena->Take<T>(columns)),
        across_(arena->Take<float>(num_rows * across_width_)),
        down_(kIsOne ? across_ : arena->Take<float>(num_rows / kGroup * down_width_)) {
    std::memset(static_cast<void*>(zeros_), 0, columns * sizeof(T));
  }

  int64_t across_width() const { return across_width_; }
  int64_t down_width() const { return down_width_; }
  const float* Across(int64_t row) const { return across_ + row * across_width_; }
  const float* down() const { return down_; }

  // `place(row)`: of the first `count` rows; the others, up to num_rows, are zero.
  template <typename Place>
  void Pack(int64_t count, int64_t num_rows, const Place& place) {
    const auto row_at = [&](int64_t row) { return row < count ? place(row) : zeros_; };
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* const from = row_at(row);
      for (int64_t w = 0; w < across_width_; w += Dot<T>::kAcross * kLanes) {
        const int64_t d = w * Dot<T>::kPerLane;
        Lanes vectors[Dot<T>::kAcross];
        Dot<T>::LoadQuery(from + d, columns_ - d, vectors);
        std::memcpy(across_ + row * across_width_ + w, vectors, sizeof(vectors));
      }
    }
    if constexpr (!kIsOne) PackDown(num_rows, row_at);
  }

  // Packs the form `down` alone.
  template <typename Place>
  void PackDown(int64_t num_rows, const Place& place) {
    for (int64_t row = 0; row < num_rows; row += kGroup) {
      const T* from[kGroup];
      for (int i = 0; i < kGroup; ++i) from[i] = place(row + i);
      for (int64_t d = 0; d < down_width_; d += Dot<T>::kDown * kLanes) {
        const T* columns[kGroup];
        for (int i = 0; i < kGroup; ++i) columns[i] = from[i] + d;
        Lanes vectors[Dot<T>::kDown];
        Dot<T>::LoadDown(columns, columns_ - d, vectors);
        std::memcpy(down_ + row / kGroup * down_width_ + d, vectors, sizeof(vectors));
      }
    }
  }

 private:
  static constexpr int kGroup = Dot<T>::kPerLane;
  static constexpr bool kIsOne = kGroup == 1;

  const int64_t columns_;
  const int64_t across_width_;
  const int64_t down_width_;
  T* const zeros_;  // [columns]
  float* const across_;
  float* const down_;
};

template <typename T>
class Differentiation {
 public:
  Differentiation(const BackwardParams& b, const WorkItem& item, const RowNumbers& numbers,
                  Arena* arena)
      : b_(b),
        p_(b.forward),
        item_(item),
        tokens_(p_.QueryTokensOf(item.sequence)),
        group_(p_.group.number),
        tile_tokens_(TileTokens(p_)),
        max_rows_(PaddedRows(tile_tokens_)),
        queries_(p_.head_size, max_rows_, arena),
        douts_(p_.value_head_size, max_rows_, arena),
        keys_(p_.head_size, queries_.across_width(), 1, arena),
        values_(p_.value_head_size, douts_.across_width(), 1, arena),
        keys_down_(p_.head_size, kMaxTile, arena),
        places_of_keys_(arena->Take<const char*>(kMaxTile)),
        places_of_values_(arena->Take<const char*>(kMaxTile)),
        dkey_(arena->Take<float>(kMaxTile * queries_.down_width())),
        dvalue_(arena->Take<float>(kMaxTile * douts_.down_width())),
        weights_(b, item, numbers, tokens_, max_rows_, arena),
        hulls_(arena->Take<Span>(CeilDiv(item.tokens.end - item.tokens.begin, tile_tokens_))) {}

  void Run() {
    const int64_t num_rows = (item_.tokens.end - item_.tokens.begin) * group_;
    if (item_.has_dquery) {
      std::memset(item_.dquery, 0, num_rows * queries_.down_width() * sizeof(float));
    }
    int64_t n = 0;
    for (int64_t i = item_.tokens.begin; i < item_.tokens.end; i += tile_tokens_) {
      hulls_[n++] = p_.AttendedByAny(tokens_, i, LastOfTile(i));
    }
    for (int64_t at = item_.positions.begin; at < item_.positions.end; at += kMaxTile) AddTile(at);
    if (item_.has_dquery) WriteQueries();
  }

 private:
  // Rows in whole blocks.
  int64_t PaddedRows(int64_t num_tokens) const {
    constexpr int64_t kBlock = kBlockRows % Dot<T>::kPerLane == 0 ? kBlockRows : 2 * kBlockRows;
    return RoundUp(num_tokens * group_, kBlock);
  }
  int64_t LastOfTile(int64_t i) const { return Smaller(i + tile_tokens_, item_.tokens.end) - 1; }

  // Adds all that has to do with the KV tile at this position.
  void AddTile(int64_t at) {
    const int64_t count = Smaller(kMaxTile, tokens_.Count() - at);
    bool is_packed = false;
    for (int64_t n = 0, i = item_.tokens.begin; i < item_.tokens.end; ++n, i += tile_tokens_) {
      if (hulls_[n].end <= at || hulls_[n].begin >= at + count) continue;
      if (!is_packed) PackTile(at, count);
      is_packed = true;
      AddRows(at, count, i, LastOfTile(i) + 1 - i);
    }
    if (!item_.has_dkey) return;
    if (!is_packed) ClearTile();
    WriteTile(at, count);
  }

  void ClearTile() {
    std::memset(dkey_, 0, kMaxTile * queries_.down_width() * sizeof(float));
    std::memset(dvalue_, 0, kMaxTile * douts_.down_width() * sizeof(float));
  }

  // After the sequence's last position its row is repeated: no row attends there.
  void PackTile(int64_t at, int64_t count) {
    ClearTile();
    const auto& cache = p_.cache;
    for (int64_t j = 0; j < kMaxTile; ++j) {
      const int64_t offset = cache.Offset(tokens_.first + at + Smaller(j, count - 1), 0);
      const T* const key = static_cast<const T*>(cache.keys) + offset;
      const T* const value = static_cast<const T*>(cache.values) + cache.OffsetOfValue(offset);
      places_of_keys_[j] =
          reinterpret_cast<const char*>(key + item_.kv_head * cache.head_stride);
      places_of_values_[j] =
          reinterpret_cast<const char*>(value + item_.kv_head * cache.value_head_stride);
    }
    keys_.Pack(CachedRows<T>{{places_of_keys_, 0}}, {0, kMaxTile});
    values_.Pack(CachedRows<T>{{places_of_values_, 0}}, {0, kMaxTile});
    if (!item_.has_dquery) return;
    keys_down_.PackDown(kMaxTile, [&](int64_t j) {
      return reinterpret_cast<const T*>(places_of_keys_[j]);
    });
  }

  // The KV tile and the query tile of the tokens from i on.
  void AddRows(int64_t at, int64_t count, int64_t i, int64_t num_tokens) {
    const int64_t num_rows = PaddedRows(num_tokens), first_head = item_.kv_head * group_;
    const auto place = [&](const void* array, int64_t stride, int64_t columns) {
      return [=, first = tokens_.first + i, group = group_](int64_t row) {
        const int64_t head = first_head + row % group;
        return static_cast<const T*>(array) + (first + row / group) * stride + head * columns;
      };
    };
    queries_.Pack(num_tokens * group_, num_rows, place(p_.query, p_.query_stride, p_.head_size));
    douts_.Pack(num_tokens * group_, num_rows, place(b_.dout, b_.dout_stride, p_.value_head_size));
    weights_.SetRows(at, count, i, num_tokens, num_rows);
    Multiply(queries_, keys_, num_rows, weights_.logits());
    Multiply(douts_, values_, num_rows, weights_.dweights());
    weights_.Apply();
    if (item_.has_dquery) {
      const int64_t width = queries_.down_width();
      float* const dquery = item_.dquery + (i - item_.tokens.begin) * group_ * width;
      // Rows past the tokens have no memory.
      ForEachBlock<kBlockRows>(0, num_tokens * group_, [&](auto size, int64_t first) {
        const Span range = weights_.PositionsOf(first, size);
        AddOuterProducts<size, T, false>(weights_.DlogitsAcross(first), range, keys_down_.down(),
                                         width, dquery + first * width);
      });
    }
    if (!item_.has_dkey) return;
    ForEachBlock<kBlockRows>(0, count, [&](auto size, int64_t first) {
      const Span range = weights_.RowsOf(first, size);
      AddOuterProducts<size, T, true>(weights_.WeightsDown() + first, range, douts_.down(),
                                      douts_.down_width(), dvalue_ + first * douts_.down_width());
      AddOuterProducts<size, T, true>(weights_.DlogitsDown() + first, range, queries_.down(),
                                      queries_.down_width(), dkey_ + first * queries_.down_width());
    });
  }

  // products[row, j] of the rows with the KV tile, [rows, kMaxTile].
  void Multiply(const PackedRows<T>& rows, const PackedKeys<T>& k, int64_t num_rows,
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

  // Puts the columns of sums in their own order, times a factor.
  static void Write(float* sums, int64_t width, int64_t columns, float factor, T* to) {
    constexpr int kVectors = Dot<T>::kDown;
    if constexpr (kVectors > 1) {
      for (int64_t d = 0; d < width; d += kVectors * kLanes) {
        Lanes vectors[kVectors];
        std::memcpy(vectors, sums + d, sizeof(vectors));
        StoreInOrder(vectors, sums + d);
      }
    }
    for (int64_t d = 0; d < columns; d += kLanes) {
      // Adding 0 turns -0 into 0.
      StoreNarrow(Load<Lanes>(sums + d) * factor + 0.0f, to + d, columns - d);
    }
  }

  void WriteTile(int64_t at, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = (tokens_.first + at + j) * p_.num_kv_heads + item_.kv_head;
      const int64_t width = queries_.down_width(), value_width = douts_.down_width();
      Write(dkey_ + j * width, width, p_.head_size, p_.scale,
            static_cast<T*>(b_.dkey) + row * p_.head_size);
      Write(dvalue_ + j * value_width, value_width, p_.value_head_size, 1,
            static_cast<T*>(b_.dvalue) + row * p_.value_head_size);
    }
  }

  void WriteQueries() const {
    const int64_t width = queries_.down_width();
    float* sums = item_.dquery;
    for (int64_t i = item_.tokens.begin; i < item_.tokens.end; ++i) {
      for (int64_t h = 0; h < group_; ++h, sums += width) {
        const int64_t row = (tokens_.first + i) * p_.num_heads + item_.kv_head * group_ + h;
        Write(sums, width, p_.head_size, p_.scale,
              static_cast<T*>(b_.dquery) + row * p_.head_size);
      }
    }
  }

  const BackwardParams& b_;
  const Params& p_;
  const WorkItem& item_;
  const QueryTokens tokens_;
  const int64_t group_;
  const int64_t tile_tokens_;
  const int64_t max_rows_;
  PackedRows<T> queries_;
  PackedRows<T> douts_;
  PackedKeys<T> keys_;
  PackedKeys<T> values_;
  PackedRows<T> keys_down_;
  const char** const places_of_keys_;    // [kMaxTile]
  const char** const places_of_values_;  // [kMaxTile]
  float* const dkey_;                    // [kMaxTile, down width]
  float* const dvalue_;                  // [kMaxTile, down width]
  Weights<T> weights_;
  Span* const hulls_;  // of each query tile: from the first to the last position attended to
};

void SumRows(const BackwardParams& b, int64_t first, int64_t end, const RowNumbers& numbers) {
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

int64_t DqueryColumns(const Params& p) {
  int64_t columns = 0;
  WithTensorType(p.dtype,
                 [&](auto type) { columns = DownWidth<decltype(type)>(p.head_size); });
  return columns;
}

void Differentiate(const BackwardParams& b, const WorkItem& item, const RowNumbers& numbers,
                   Arena* arena) {
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
    XLA_GPU_STRING(XLA_GPU_INSTRUCTION_SET), SumRows, DqueryColumns, Differentiate};

}  // namespace xla_gpu::varlen_attention
