// Compiled once for each type of query, type of cache and head size, so that a build uses all
// cores.
#include "kernels.cuh"
#include "tensor_core.cuh"

namespace xla_gpu::paged_attention {

// Whether max_query_len promises that no work item has more than `warp_rows` groups of 16 rows.
inline bool FitsQueryTile(const Params& p, int warp_rows) {
  const int64_t rows = int64_t{warp_rows} * kRowsPerWarpTile;
  return p.max_query_len != 0 && p.max_query_len <= rows / (p.num_heads / p.num_kv_heads);
}

template <int kWarpRows>
AttentionKernel KernelOf() {
  using Layout = TensorCoreLayout<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>;
  return {{TensorCoreAttention<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE, kWarpRows>,
           kThreads, Layout::SharedBytes(kWarpRows)},
          kMaxRowsPerItem,
          kWarpRows};
}

template <>
AttentionKernel TensorCoreKernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(
    const Params& p) {
  using Layout = TensorCoreLayout<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>;
  if (FitsQueryTile(p, Layout::kFewWarpRows)) return KernelOf<Layout::kFewWarpRows>();
  return KernelOf<kWarps>();
}

}  // namespace xla_gpu::paged_attention
