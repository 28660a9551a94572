#include <algorithm>
#include <atomic>

#include "../../gpu/launch.cuh"
#include "cuda_core.cuh"
#include "finish.cuh"
#include "kernels.cuh"
#include "run.h"

namespace xla_gpu::paged_attention {
namespace {

// Thread blocks of the Finish kernel: enough to fill the GPU, and no more tokens per block than
// that leaves.
constexpr int kFinishBlocksPerMultiprocessor = 8;
constexpr int kFinishSharedBytes = kWarps * sizeof(int);

template <typename T, int kColumns, int... kMore>
AttentionKernel SmallestCudaCoreKernel(const Params& p,
                                       std::integer_sequence<int, kColumns, kMore...>) {
  if constexpr (sizeof...(kMore) > 0) {
    if (p.head_size > kColumns * gpu::kWarpSize) {
      return SmallestCudaCoreKernel<T>(p, std::integer_sequence<int, kMore...>());
    }
  }
  return {{CudaCoreAttention<T, kColumns>, kThreads, CudaCoreSharedBytes<kColumns>()}, kCoreRows};
}

// The kernel with the fewest columns that hold p.head_size.
template <typename T>
AttentionKernel CudaCoreKernel(const Params& p) {
  return SmallestCudaCoreKernel<T>(p, std::integer_sequence<int, XLA_GPU_CUDA_CORE_COLUMNS>());
}

// Adds the tensor core kernels for a cache of type C: for any query length, and for one query
// token.
template <typename C, int... kHeadSizes>
void AddTensorCoreLaunches(std::integer_sequence<int, kHeadSizes...>,
                           std::vector<KernelLaunch>* launches) {
  Params p = {};
  p.num_heads = p.num_kv_heads = 1;
  for (const int64_t max_query_len : {0, 1}) {
    p.max_query_len = max_query_len;
    const auto add = [&](int head_size, const AttentionKernel& attention) {
      launches->push_back({"TensorCoreAttention", head_size, sizeof(C), attention.warp_rows,
                           kThreads, attention.kernel.shared_bytes});
    };
    (add(kHeadSizes, TensorCoreKernelOf<Half, C, kHeadSizes>(p)), ...);
  }
}

// The tensor core kernels copy rows 16 bytes at a time; the Hopper kernel writes 4 bytes at a time.
template <typename C>
bool IsAligned(const Params& p) {
  for (const int64_t size : {p.head_size, p.value_head_size, p.query_stride, p.cache.block_stride,
                             p.cache.position_stride, p.cache.head_stride}) {
    if (size * static_cast<int64_t>(sizeof(C)) % 16 != 0) return false;
  }
  for (const void* array :
       {p.query, static_cast<const void*>(p.output), static_cast<const void*>(p.cache.keys),
        static_cast<const void*>(p.cache.values)}) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0) return false;
  }
  return true;
}

// T: type of the query. C: type of the cache.
template <typename T, typename C>
AttentionKernel KernelOf(const Params& p) {
  if constexpr (sizeof(T) == 2) {
    if (IsAligned<C>(p) && p.head_size <= kLargestTensorCoreHeadSize<C>) {
      return TensorCoreKernel<T, C>(p);
    }
  }
  return CudaCoreKernel<C>(p);
}

template <typename T>
AttentionKernel KernelFor(const Params& p) {
  switch (p.cache_dtype) {
    case DType::kFloat8E4M3:
      return KernelOf<T, Float8E4M3>(p);
    case DType::kFloat8E5M2:
      return KernelOf<T, Float8E5M2>(p);
    case DType::kInt8:
      return KernelOf<T, int8_t>(p);
    default:
      return KernelOf<T, T>(p);
  }
}

constexpr char kAny[] = "any", kHopper[] = "hopper";

std::atomic<bool>& HopperIsChosen() {
  static std::atomic<bool> is_chosen(false);
  return is_chosen;
}

template <typename T, int... kHeadSizes>
bool FindHopperKernel(const Params& p, std::integer_sequence<int, kHeadSizes...>,
                      AttentionKernel* kernel) {
  [[maybe_unused]] const auto take = [&](bool fits, const AttentionKernel& with) {
    if (fits) *kernel = with;
    return fits;
  };
  return (take(p.head_size <= kHeadSizes, HopperKernelOf<T, kHeadSizes>()) || ...);
}

// Returns whether this call's long queries have a kernel of their own, and sets *kernel to it.
template <typename T>
bool FindPrefillKernel(const gpu::Device& device, const Params& p, AttentionKernel* kernel) {
  if constexpr (sizeof(T) == 2) {
    if (!HopperIsChosen() || !device.is_hopper) return false;
    if (p.max_query_len != 0 && p.max_query_len <= TokensPerTile(p)) return false;
    if (p.cache_dtype != p.dtype || !IsAligned<T>(p)) return false;
    return FindHopperKernel<T>(p, HopperHeadSizes(), kernel);
  }
  return false;
}

gpu::Error Attend(const AttentionKernel& attention, const gpu::Device& device, const Params& p,
                  const Scratch& scratch, QueryLengths lengths, void* stream) {
  const int64_t num_items = MaxItems(p, scratch, attention.rows_per_item);
  return attention.kernel.LaunchResident(device, num_items, stream, p, scratch, lengths);
}

template <typename T>
gpu::Error Run(const Params& p, const Scratch& scratch, void* stream) {
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  AttentionKernel prefill;
  const bool has_prefill = FindPrefillKernel<T>(device, p, &prefill);
  const QueryLengths others = has_prefill ? QueryLengths::kShort : QueryLengths::kAll;
  gpu::Error error = Attend(KernelFor<T>(p), device, p, scratch, others, stream);
  if (!error && has_prefill) {
    error = Attend(prefill, device, p, scratch, QueryLengths::kLong, stream);
  }
  if (error) return error;
  const gpu::Kernel<Params, Scratch> finish{Finish<T>, kThreads, kFinishSharedBytes};
  const int64_t num_blocks = int64_t{kFinishBlocksPerMultiprocessor} * device.num_multiprocessors;
  return finish.Launch(device, Smaller(num_blocks, p.num_tokens), stream, p, scratch);
}

template <int... kHeadSizes>
void AddHopperLaunches(std::integer_sequence<int, kHeadSizes...>,
                       std::vector<KernelLaunch>* launches) {
  [[maybe_unused]] const auto add = [&](int head_size, const AttentionKernel& attention) {
    launches->push_back({"HopperAttention", head_size, 0, 0, attention.kernel.num_threads,
                         attention.kernel.shared_bytes});
  };
  (add(kHeadSizes, HopperKernelOf<Half, kHeadSizes>()), ...);
}

}  // namespace

std::vector<KernelLaunch> KernelLaunches() {
  std::vector<KernelLaunch> launches = {{"Finish", 0, 0, 0, kThreads, kFinishSharedBytes}};
  for (const int columns : {XLA_GPU_CUDA_CORE_COLUMNS}) {
    Params p = {};
    p.head_size = columns * gpu::kWarpSize;
    const auto& kernel = CudaCoreKernel<float>(p).kernel;
    launches.push_back({"CudaCoreAttention", columns, 0, 0, kThreads, kernel.shared_bytes});
  }
  AddTensorCoreLaunches<Half>(TensorCoreHeadSizes<Half>(), &launches);
  AddTensorCoreLaunches<int8_t>(TensorCoreHeadSizes<int8_t>(), &launches);
  AddHopperLaunches(HopperHeadSizes(), &launches);
  return launches;
}

std::vector<std::string> CudaPrefills() {
  if (HopperHeadSizes::size() == 0) return {kAny};
  return {kAny, kHopper};
}

bool ChooseCudaPrefill(const std::string& name) {
  const std::vector<std::string> offered = CudaPrefills();
  if (std::find(offered.begin(), offered.end(), name) == offered.end()) return false;
  HopperIsChosen() = name == kHopper;
  return true;
}

std::string CudaPrefill() { return HopperIsChosen() ? kHopper : kAny; }

gpu::Error RunOnCuda(const Params& p, const Scratch& scratch, void* stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return Run<float>(p, scratch, stream);
    case DType::kFloat16:
      return Run<Half>(p, scratch, stream);
    case DType::kBFloat16:
      return Run<BFloat16>(p, scratch, stream);
    default:
      return {"paged_attention", "unknown storage type"};
  }
}

}  // namespace xla_gpu::paged_attention
