// The CPU kernel, compiled once for each instruction set. Top to bottom, for a work item:
//
//   rows.h             the query rows of the item, their indices and queries
//   mask.h             which positions of a KV tile a row attends to
//   page_table.h       where their K and V lie
//   prefetch.h         the next tile is prefetched while the current one is read
//   coded_rows.h       K and V of 4 bits, as few query rows read them with AVX-512
//   float_rows.h       K and V with scales of groups become float32, tile by tile
//   int4_rows.h        other K and V of 4 bits become those of 8 bits
//   kv_rows.h          K and V of a tile, in the cache or packed
//   qk.h               q . k, a block of rows by some positions at a time
//   softmax.h          the online softmax
//   pv.h               weights times V, a block of rows by some columns at a time
//   partial_results.h  the sums of a split and their merge
//
// Where a kv head has more than kChunkRows rows, K and V of a split are packed once, then chunks of
// rows attend to its tiles, one after the other. All other rows attend to each tile as it comes.
//
// A row's bits depend on the row and on what it attends to, and on nothing else: neither on the
// rows beside it nor on how the work is cut. So they are the same in any batch, for any number of
// threads, and for a token that is prefilled, chunked or decoded. The order of all additions is
// fixed, and no compiler may choose which products to fuse (-ffp-contract=off). Instruction sets
// differ in their bits.
#include "kernel.h"

#include "partial_results.h"
#include "pv.h"
#include "qk.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr int64_t kMaxCachedRows = 12;  // of a kv head: more are worth packing K and V for
constexpr int64_t kTilesOfSplit = kSplit / kMaxTile;

// Attends to the KV tiles of a work item, split by split.
template <typename T>
class ItemKernel {
 public:
  ItemKernel(const Rows& rows, Arena* arena)
      : rows_(rows),
        is_packed_(rows.per_head > kMaxCachedRows),
        shares_split_(rows.per_head > kChunkRows),
        tile_size_(is_packed_ ? kMaxTile : kStep),
        num_passes_(is_packed_ ? NumBlocks<kBlockRows>(rows.per_head)
                               : NumBlocks<kCachedRows>(rows.per_head)),
        queries_(rows, arena),
        mask_(rows, arena),
        pages_(rows, tile_size_, arena),
        softmax_(rows, mask_, arena),
        sums_(rows, arena),
        keys_(rows.p.head_size, queries_.width(), shares_split_ ? kTilesOfSplit : 1, arena),
        values_(rows.p.value_head_size, sums_.width(), shares_split_ ? kTilesOfSplit : 1, arena) {}

  // [rows, width]: the sums of the current split.
  float* Sums() { return sums_.Values(0); }

  // Calls end_split(number, sums) after each split.
  template <typename EndSplit>
  void Run(const EndSplit& end_split) {
    const WorkItem& item = rows_.item;
    for (int64_t split = item.begin / kSplit * kSplit; split < item.end; split += kSplit) {
      sums_.Clear();
      const int64_t begin = Larger(item.begin, split), end = Smaller(item.end, split + kSplit);
      KvTile tiles[kTilesOfSplit];
      bool are_safe[kTilesOfSplit];
      int64_t num_tiles = 0;
      for (int64_t at = begin / tile_size_ * tile_size_; at < end; at += tile_size_) {
        pages_.Advance(at);
        const KvTile tile = mask_.TileAt(at, Larger(begin, at), Smaller(end, at + tile_size_));
        if (shares_split_) {
          keys_.Select(num_tiles);
          values_.Select(num_tiles);
          tiles[num_tiles] = tile;
          are_safe[num_tiles++] = Pack(0, tile);
        } else {
          for (int64_t head = 0; head < item.num_kv_heads; ++head) AttendToTile(head, tile);
        }
      }
      if (shares_split_) AttendByChunks(tiles, are_safe, num_tiles);
      end_split(split / kSplit - item.begin / kSplit, &sums_);
    }
  }

 private:
  // `head`: of the item's kv heads.
  void AttendToTile(int64_t head, const KvTile& tile) {
    const int64_t first = head * rows_.per_head;
    Prefetcher next = pages_.PrefetcherOf(head, num_passes_);
    if (!is_packed_) {
      WithKeys(head, [&](const auto& k) {
        MultiplyCachedKeys(rows_, &queries_, mask_, tile, head, k, softmax_.weights(), &next);
      });
      softmax_.template Apply<kCachedRows>(tile, head, sums_.States(first));
      WithValues(head, [&](const auto& v) {
        AddValues<kCachedRows>(rows_, mask_, tile, softmax_, v, !tile.is_partial, sums_.width(),
                               sums_.Values(first), &next);
      });
      return;
    }
    const bool is_safe = Pack(head, tile);
    AttendToPacked(head, tile, is_safe, &next);
  }

  // Calls function(rows) for a kv head's K, or V, of a tile as a few query rows read it.
  template <typename Function>
  void WithKeys(int64_t head, const Function& function) {
#ifdef XLA_GPU_READS_CODES
    if constexpr (std::is_same_v<T, float>) {
      if (pages_.KeysAreCodes()) return function(pages_.KeyCodes(head));
    }
#endif
    function(CachedRows<T>{pages_.Keys(head)});
  }
  template <typename Function>
  void WithValues(int64_t head, const Function& function) {
#ifdef XLA_GPU_READS_CODES
    if constexpr (std::is_same_v<T, float>) {
      if (pages_.ValuesAreCodes()) return function(pages_.ValueCodes(head));
    }
#endif
    function(CachedRows<T>{pages_.Values(head)});
  }

  // Packs K and V of a tile. Returns whether a weight of zero may meet any V.
  bool Pack(int64_t head, const KvTile& tile) {
    keys_.Pack({pages_.Keys(head)}, tile.range);
    values_.Pack({pages_.Values(head)}, tile.range);
    if (shares_split_) pages_.PrefetchNext(head);  // elsewhere the products prefetch
    return !tile.is_partial || values_.IsFinite(tile.range);
  }

  // The rows at hand to the selected tile.
  void AttendToPacked(int64_t head, const KvTile& tile, bool is_safe, Prefetcher* next) {
    const int64_t first = head * rows_.per_head;
    MultiplyPackedKeys(rows_, &queries_, mask_, tile, head, keys_, pages_.num_read(),
                       softmax_.weights(), next);
    softmax_.template Apply<kWeighedRows>(tile, head, sums_.States(first));
    AddValues<kBlockRows>(rows_, mask_, tile, softmax_, values_, is_safe, sums_.width(),
                          sums_.Values(first), next);
  }

  // The rows of a kv head to the packed tiles of a split, chunk after chunk.
  void AttendByChunks(const KvTile* tiles, const bool* are_safe, int64_t num_tiles) {
    Prefetcher nothing;
    const int64_t num_chunks = CeilDiv(rows_.per_head, kChunkRows);
    const int64_t size = RoundUp(CeilDiv(rows_.per_head, num_chunks), kBlockRows);
    for (int64_t first = 0; first < rows_.per_head; first += size) {
      const Range chunk = {first, Smaller(first + size, rows_.per_head)};
      for (int64_t i = 0; i < num_tiles; ++i) {
        KvTile tile = tiles[i];
        tile.rows = chunk;
        const Range range = mask_.RangeOf(tile, first, chunk.end - first);
        if (range.begin >= range.end) continue;
        keys_.Select(i);
        values_.Select(i);
        AttendToPacked(0, tile, are_safe[i], &nothing);
      }
    }
  }

  const Rows& rows_;
  const bool is_packed_;
  const bool shares_split_;  // several chunks of rows share the packed K and V of a split
  const int64_t tile_size_;
  const int64_t num_passes_;  // of K and of V: by each block of rows
  Queries<T> queries_;
  AttentionMask mask_;
  PageTable<T> pages_;
  Softmax<T> softmax_;
  SplitSums<T> sums_;
  PackedKeys<T> keys_;
  PackedValues<T> values_;
};

template <typename T>
void AttendAs(const Params& p, const WorkItem& item, Arena* arena) {
  const Rows rows(p, item);
  ItemKernel<T> kernel(rows, arena);
  if (item.tile == nullptr) {
    Totals<T> totals(rows, item.HasOneSplit() ? kernel.Sums() : nullptr, arena);
    kernel.Run([&](int64_t /*split*/, SplitSums<T>* sums) {
      sums->Finish([&](int64_t row, float max, float weight, const float* values) {
        totals.Add(row, max, weight, values);
      });
    });
    totals.Write();
    return;
  }
  kernel.Run([&](int64_t split, SplitSums<T>* sums) {
    sums->Finish([&](int64_t row, float max, float weight, const float* values) {
      float* to = rows.PartialResult(split, row);
      to[0] = max;
      to[1] = weight;
      std::memcpy(to + 2, values, p.value_head_size * sizeof(float));
    });
  });
}

template <typename T>
void MergeAs(const Params& p, const WorkItem& whole, Arena* arena) {
  const Rows rows(p, whole);
  Totals<T> totals(rows, nullptr, arena);
  for (int64_t split = 0; split < whole.NumSplits(); ++split) {
    for (int64_t row = 0; row < rows.count; ++row) {
      const float* from = rows.PartialResult(split, row);
      totals.Add(row, from[0], from[1], from + 2);
    }
  }
  totals.Write();
}

// Calls function(T()) for the type of the cache.
template <typename Function>
void WithCacheType(const Params& p, const Function& function) {
  if (p.NeedsFloat32Rows()) return function(float());
#ifdef XLA_GPU_PAIRS_BYTES
  if (p.dtype == DType::kBFloat16) {
    if (p.cache_dtype == DType::kFloat8E4M3) return function(PairedFloat8E4M3());
    if (p.cache_dtype == DType::kFloat8E5M2) return function(PairedFloat8E5M2());
    if (p.cache_dtype >= DType::kInt8) return function(PairedInt8());
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
    default:
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
