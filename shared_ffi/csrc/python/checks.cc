// What the checks of the ops in Python ask of C++.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kv_cache_update/tokens.h"
#include "module.h"
#include "paged_attention/cuda/plan.h"
#include "paged_attention/metadata.h"

namespace xla_gpu {
namespace {

namespace nb = nanobind;

template <typename T, int kRank>
using Array = nb::ndarray<const T, nb::ndim<kRank>, nb::c_contig, nb::device::cpu>;

std::string MetadataError(const Array<int32_t, 1>& context_lens,
                          const Array<int32_t, 2>& block_tables,
                          const Array<int32_t, 1>& query_start_loc, int32_t num_seqs,
                          nb::dict token_pairs, const std::optional<Array<int32_t, 1>>& causal,
                          int64_t num_tokens, int64_t num_blocks, int64_t block_size,
                          int64_t sliding_window, int64_t max_query_len, bool is_causal) {
  paged_attention::Params params = {};
  params.context_lens = context_lens.data();
  params.block_tables = block_tables.data();
  params.query_start_loc = query_start_loc.data();
  params.num_seqs = &num_seqs;
  params.causal = causal.has_value() ? causal->data() : nullptr;
  params.num_tokens = num_tokens;
  params.num_blocks = num_blocks;
  params.block_size = block_size;
  params.max_seqs = static_cast<int64_t>(context_lens.shape(0));
  params.max_blocks_per_seq = static_cast<int64_t>(block_tables.shape(1));
  params.sliding_window = sliding_window;
  params.max_query_len = max_query_len;
  params.is_causal = is_causal;
  if (block_tables.shape(0) != context_lens.shape(0) ||
      query_start_loc.shape(0) != context_lens.shape(0) + 1 ||
      (causal.has_value() && causal->shape(0) != context_lens.shape(0))) {
    throw nb::value_error("the arrays must be for the same number of sequences");
  }
  for (const auto& [name, array] : paged_attention::kTokenPairs) {
    if (!token_pairs.contains(name)) continue;
    const auto pairs = nb::cast<Array<int32_t, 2>>(token_pairs[name], /*convert=*/false);
    if (pairs.shape(0) != static_cast<size_t>(num_tokens) || pairs.shape(1) != 2) {
      throw nb::value_error("tree masks and ranges must have two numbers for each token");
    }
    params.*array = pairs.data();
  }
  return paged_attention::MetadataError(params);
}

std::string TokenError(const Array<int64_t, 1>& slot_mapping,
                       const std::optional<Array<int64_t, 1>>& positions, int64_t num_blocks,
                       int64_t block_size, int64_t max_positions) {
  kv_cache_update::Params params = {};
  params.slot_mapping = {slot_mapping.data(), /*are_int64=*/true};
  params.num_tokens = static_cast<int64_t>(slot_mapping.shape(0));
  params.num_blocks = num_blocks;
  params.block_size = block_size;
  params.rotary.max_positions = max_positions;
  if (positions.has_value()) {
    params.rotary.positions = {positions->data(), /*are_int64=*/true};
    if (positions->shape(0) != slot_mapping.shape(0)) {
      throw nb::value_error("positions must have a number for each slot");
    }
  }
  return kv_cache_update::TokenError(params);
}

paged_attention::ScratchSizes ScratchSizes(int64_t num_heads, int64_t num_kv_heads,
                                           int64_t value_head_size, int64_t sliding_window,
                                           int64_t max_query_len) {
  paged_attention::Params params = {};
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.group = paged_attention::Divisor(num_heads / num_kv_heads);
  params.value_head_size = value_head_size;
  params.sliding_window = sliding_window;
  params.max_query_len = max_query_len;
  return paged_attention::MakeScratchSizes(params);
}

// What cuda_plan returns of a kernel: its name, the least and the most query tokens of the
// sequences that it takes, the thread blocks that have something to do, and whether it begins
// early.
using PlannedLaunch = std::tuple<std::string, int64_t, int64_t, int64_t, bool>;

std::vector<PlannedLaunch> CudaPlan(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads,
                                    int64_t max_seqs, int64_t capacity, int64_t sliding_window,
                                    int64_t max_query_len, bool has_decode, int64_t long_rows,
                                    bool is_hopper, bool launches_early) {
  using paged_attention::Divisor;
  paged_attention::Params params = {};
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_size = params.value_head_size = 128;
  params.group = Divisor(num_heads / num_kv_heads);
  params.block = Divisor(1);
  params.block_size = 1;
  params.max_seqs = max_seqs;
  params.max_blocks_per_seq = capacity;
  params.sliding_window = sliding_window;
  params.max_query_len = max_query_len;
  paged_attention::Scratch scratch;
  paged_attention::MakeScratch(params, nullptr, &scratch);
  const paged_attention::decode::Numbers decode(params, paged_attention::decode::kItemRows,
                                                /*chunk=*/8);
  const paged_attention::Plan plan(
      params, scratch,
      {has_decode ? &decode : nullptr, paged_attention::kMaxRowsPerItem, long_rows, is_hopper,
       launches_early});
  constexpr const char* kNames[] = {"zero arrivals",    "decode",         "portable",
                                    "portable prefill", "Hopper prefill", "combine"};
  std::vector<PlannedLaunch> launches;
  for (const paged_attention::Launch& launch : plan) {
    launches.emplace_back(kNames[static_cast<int>(launch.step)], launch.lengths.min,
                          launch.lengths.max, launch.num_blocks, launch.begins_early);
  }
  return launches;
}

}  // namespace

void BindChecks(nb::module_& m) {
  m.def("metadata_error", &MetadataError, nb::arg("context_lens").noconvert(),
        nb::arg("block_tables").noconvert(), nb::arg("query_start_loc").noconvert(),
        nb::arg("num_seqs"), nb::kw_only(), nb::arg("token_pairs"),
        nb::arg("causal").noconvert().none(), nb::arg("num_tokens"), nb::arg("num_blocks"),
        nb::arg("block_size"), nb::arg("sliding_window"), nb::arg("max_query_len"),
        nb::arg("is_causal"),
        "Which rule for lengths and page table of paged_attention is broken first; empty if none.");
  m.def("token_error", &TokenError, nb::arg("slot_mapping").noconvert(),
        nb::arg("positions").noconvert().none(), nb::kw_only(), nb::arg("num_blocks"),
        nb::arg("block_size"), nb::arg("max_positions"),
        "Which token of kv_cache_update has an illegal slot or position first; empty if none.");
  using paged_attention::ScratchSizes;
  nb::class_<ScratchSizes>(m, "ScratchSizes", "What the size of the CUDA scratch follows from.")
      .def_ro("split_limit", &ScratchSizes::split_limit)
      .def_ro("max_split_tokens", &ScratchSizes::max_split_tokens)
      .def_ro("tile_tokens", &ScratchSizes::tile_tokens)
      .def_ro("max_length", &ScratchSizes::max_length)
      .def_ro("flag_bytes", &ScratchSizes::flag_bytes)
      .def_ro("decode_tokens", &ScratchSizes::decode_tokens)
      .def_ro("enough_slots", &ScratchSizes::enough_slots)
      .def_ro("most_group_slots", &ScratchSizes::most_group_slots)
      .def_ro("most_runs", &ScratchSizes::most_runs)
      .def_ro("partial_bytes", &ScratchSizes::partial_bytes)
      .def_ro("alignment", &ScratchSizes::alignment)
      .def_ro("group", &ScratchSizes::group)
      .def_ro("max_group_splits", &ScratchSizes::max_group_splits)
      .def_ro("max_slots", &ScratchSizes::max_slots)
      .def_ro("slot_bytes", &ScratchSizes::slot_bytes)
      .def_ro("leaf", &ScratchSizes::leaf);
  m.def("scratch_sizes", &xla_gpu::ScratchSizes, nb::kw_only(), nb::arg("num_heads"),
        nb::arg("num_kv_heads"), nb::arg("value_head_size"), nb::arg("sliding_window"),
        nb::arg("max_query_len"), "The sizes in the scratch of paged_attention.");
  m.def("cuda_plan", &CudaPlan, nb::kw_only(), nb::arg("num_tokens"), nb::arg("num_heads"),
        nb::arg("num_kv_heads"), nb::arg("max_seqs"), nb::arg("capacity"),
        nb::arg("sliding_window"), nb::arg("max_query_len"), nb::arg("has_decode"),
        nb::arg("long_rows"), nb::arg("is_hopper"), nb::arg("launches_early"),
        "The kernels that a call of paged_attention launches on CUDA, from its sizes and from the "
        "kernels that there are: names, least and most query tokens, thread blocks, and whether "
        "each begins before the one before it has ended.");
}

}  // namespace xla_gpu
