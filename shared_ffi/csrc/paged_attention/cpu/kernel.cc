// The CPU kernel, compiled once for each instruction set. Top to bottom, for a work item:
//
//   rows.h             the query rows of the item, their indices and queries
//   query_tile.h       query tiles of the item, and K and V that several of them share
//   kv_tile.h          KV tiles: the mask and the block table
//   prefetch.h         the next tile is prefetched while the current one is read
//   kv_rows.h          K and V of a tile, in the cache or packed
//   qk.h               q . k, a block of rows by some positions at a time
//   softmax.h          the online softmax
//   pv.h               weights times V, a block of rows by some columns at a time
//   partial_results.h  the sums of a split and their merge
//
// A row's bits depend on the row and on what it attends to, and on nothing else: neither on the
// rows beside it nor on how the work is cut. So they are the same in any batch, for any number of
// threads, and for a token that is prefilled, chunked or decoded. The order of all additions is
// fixed, and no compiler may choose which products to fuse (-ffp-contract=off). Instruction sets
// differ in their bits.
#include "kernel.h"

#include "pv.h"
#include "qk.h"
#include "query_tile.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kMaxCachedRows = 12;  // of a kv head: more are worth packing K and V for

// Attends to the KV tiles of a work item, split by split.
template <typename T>
class ItemKernel {
 public:
  ItemKernel(const Rows& rows, Arena* arena)
      : rows_(rows),
        is_packed_(rows.per_head > kMaxCachedRows),
        tile_size_(is_packed_ ? kMaxTile : kStep),
        num_passes_(is_packed_ ? NumBlocks<kBlockRows>(rows.per_head)
                               : NumBlocks<kCachedRows>(rows.per_head)),
        pages_(rows, tile_size_, arena),
        query_tiles_(rows, arena) {
    const QueryTile<T>& first = query_tiles_[0];
    for (int64_t n = 0; n < (query_tiles_.count() > 1 ? kTilesPerSplit : 1); ++n) {
      packed_[n].emplace(rows.p, first.queries.width(), first.sums.width(), arena);
    }
  }

  // Calls end_split(number, first_row, sums) for each query tile after each split.
  template <typename EndSplit>
  void Run(const EndSplit& end_split) {
    const WorkItem& item = rows_.item;
    for (int64_t split = item.begin / kSplit * kSplit; split < item.end; split += kSplit) {
      const Span span = {Larger(item.begin, split), Smaller(item.end, split + kSplit)};
      for (int64_t q = 0; q < query_tiles_.count(); ++q) query_tiles_[q].sums.Clear();
      query_tiles_.count() > 1 ? PackOnce(span) : TileByTile(span);
      for (int64_t q = 0; q < query_tiles_.count(); ++q) {
        end_split(split / kSplit - item.begin / kSplit, query_tiles_.FirstRow(q),
                  &query_tiles_[q].sums);
      }
    }
  }

 private:
  // Calls function(tile number, position, attended) for each KV tile of a split.
  template <typename Function>
  void ForEachTile(const Span& span, const Function& function) const {
    int64_t number = 0;
    for (int64_t at = span.begin / tile_size_ * tile_size_; at < span.end; at += tile_size_) {
      function(number++, at, Span{Larger(span.begin, at), Smaller(span.end, at + tile_size_)});
    }
  }

  // With one query tile: the next KV tile is prefetched while the current one is multiplied.
  void TileByTile(const Span& span) {
    QueryTile<T>& query = query_tiles_[0];
    ForEachTile(span, [&](int64_t, int64_t at, const Span& attended) {
      pages_.Advance(at);
      const KvTile tile = query.mask.TileAt(at, attended.begin, attended.end);
      for (int64_t head = 0; head < rows_.item.num_kv_heads; ++head) {
        const CachedRows<T> k{pages_.keys(), pages_.KeyOffset(head)};
        const CachedRows<T> v{pages_.keys(), pages_.ValueOffset(head)};
        Prefetcher next = pages_.PrefetcherOf(head, num_passes_);
        if (!is_packed_) {
          AttendToCached(&query, head, tile, k, v, &next);
          continue;
        }
        packed_[0]->Pack(k, v, tile.range);
        pages_.TouchNext(head);
        AttendToPacked(&query, head, tile, &*packed_[0], &next);
      }
    });
  }

  // With several query tiles, all of one kv head: K and V of the split are packed once, then one
  // query tile after the other attends to them, so that its queries and sums stay in a core's
  // cache.
  void PackOnce(const Span& span) {
    const CachedRows<T> k{nullptr, pages_.KeyOffset(0)}, v{nullptr, pages_.ValueOffset(0)};
    ForEachTile(span, [&](int64_t number, int64_t at, const Span& attended) {
      pages_.Advance(at);
      packed_[number]->Pack({pages_.keys(), k.offset}, {pages_.keys(), v.offset},
                            {attended.begin - at, attended.end - at});
      pages_.TouchNext(0);
    });
    Prefetcher nothing = Prefetcher::OfNothing();
    for (int64_t q = 0; q < query_tiles_.count(); ++q) {
      QueryTile<T>& query = query_tiles_[q];
      ForEachTile(span, [&](int64_t number, int64_t at, const Span& attended) {
        const int64_t begin = Larger(attended.begin, query.item.begin);
        const int64_t end = Smaller(attended.end, query.item.end);
        if (begin >= end) return;
        AttendToPacked(&query, 0, query.mask.TileAt(at, begin, end), &*packed_[number], &nothing);
      });
    }
  }

  // `head`: of the item's kv heads.
  void AttendToCached(QueryTile<T>* query, int64_t head, const KvTile& tile, const CachedRows<T>& k,
                      const CachedRows<T>& v, Prefetcher* next) {
    auto& [item, rows, queries, mask, softmax, sums] = *query;
    const int64_t first = head * rows.per_head;
    MultiplyCachedKeys(rows, queries, mask, tile, head, k, softmax.weights(), next);
    softmax.template Apply<kCachedRows>(tile, head, sums.States(first));
    AddValues<kCachedRows>(rows, mask, tile, softmax, v, !tile.is_partial, sums.width(),
                           sums.Values(first), next);
  }

  void AttendToPacked(QueryTile<T>* query, int64_t head, const KvTile& tile, PackedTile<T>* packed,
                      Prefetcher* next) {
    auto& [item, rows, queries, mask, softmax, sums] = *query;
    const int64_t first = head * rows.per_head;
    const bool is_safe = !tile.is_partial || packed->HasFiniteValues();
    MultiplyPackedKeys(rows, queries, mask, tile, head, packed->keys(), pages_.row_bytes(),
                       softmax.weights(), next);
    softmax.template Apply<kBlockRows>(tile, head, sums.States(first));
    AddValues<kBlockRows>(rows, mask, tile, softmax, packed->values(), is_safe, sums.width(),
                          sums.Values(first), next);
  }

  const Rows& rows_;
  const bool is_packed_;
  const int64_t tile_size_;
  const int64_t num_passes_;  // over K and over V: one for each block of rows
  PageTable<T> pages_;
  QueryTiles<T> query_tiles_;
  std::optional<PackedTile<T>> packed_[kTilesPerSplit];
};

template <typename T>
void AttendAs(const Params& p, const WorkItem& item, Arena* arena) {
  const Rows rows(p, item);
  ItemKernel<T> kernel(rows, arena);
  if (item.partial_results == nullptr) {
    Totals<T> totals(rows, arena);
    kernel.Run([&](int64_t /*split*/, int64_t first_row, SplitSums<T>* sums) {
      sums->Finish([&](int64_t row, float max, float weight, const float* values) {
        totals.Add(first_row + row, max, weight, values);
      });
    });
    totals.Write();
    return;
  }
  kernel.Run([&](int64_t split, int64_t first_row, SplitSums<T>* sums) {
    sums->Finish([&](int64_t row, float max, float weight, const float* values) {
      const int64_t number = split * rows.count + first_row + row;
      float* to = item.partial_results + number * PartialResultSize(p);
      to[0] = max;
      to[1] = weight;
      std::memcpy(to + 2, values, p.value_head_size * sizeof(float));
    });
  });
}

template <typename T>
void MergeAs(const Params& p, const WorkItem& whole, Arena* arena) {
  const Rows rows(p, whole);
  Totals<T> totals(rows, arena);
  for (int64_t split = 0; split < whole.NumSplits(); ++split) {
    for (int64_t row = 0; row < rows.count; ++row) {
      const float* from = whole.partial_results + (split * rows.count + row) * PartialResultSize(p);
      totals.Add(row, from[0], from[1], from + 2);
    }
  }
  totals.Write();
}

// Calls function(T()) for the type of the cache.
template <typename Function>
void WithCacheType(const Params& p, const Function& function) {
#ifdef XLA_GPU_PAIRS_BYTES
  if (p.dtype == DType::kBFloat16) {
    if (p.cache_dtype == DType::kFloat8E4M3) return function(PairedFloat8E4M3());
    if (p.cache_dtype == DType::kFloat8E5M2) return function(PairedFloat8E5M2());
    if (p.cache_dtype == DType::kInt8) return function(PairedInt8());
  }
#endif
  switch (p.cache_dtype) {
    case DType::kFloat32:
      return function(float());
    case DType::kFloat16:
      return function(Half());
    case DType::kBFloat16:
      return function(BFloat16());
    case DType::kFloat8E4M3:
      return function(Float8E4M3());
    case DType::kFloat8E5M2:
      return function(Float8E5M2());
    case DType::kInt8:
      return function(int8_t());
  }
}

void Attend(const Params& p, const WorkItem& item, Arena* arena) {
  WithCacheType(p, [&](auto type) { AttendAs<decltype(type)>(p, item, arena); });
}

void Merge(const Params& p, const WorkItem& whole, Arena* arena) {
  WithCacheType(p, [&](auto type) { MergeAs<decltype(type)>(p, whole, arena); });
}

bool IsSupported() {
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return false;
#endif
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return true;
#endif
}

}  // namespace

#define XLA_GPU_NAME_OF_KERNEL(instruction_set) kCpuKernel_##instruction_set
#define XLA_GPU_KERNEL(instruction_set) XLA_GPU_NAME_OF_KERNEL(instruction_set)
#define XLA_GPU_STRING_OF(x) #x
#define XLA_GPU_STRING(x) XLA_GPU_STRING_OF(x)

extern const CpuKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET);
const CpuKernel XLA_GPU_KERNEL(XLA_GPU_INSTRUCTION_SET) = {XLA_GPU_STRING(XLA_GPU_INSTRUCTION_SET),
                                                           IsSupported, Attend, Merge};

}  // namespace xla_gpu::paged_attention
