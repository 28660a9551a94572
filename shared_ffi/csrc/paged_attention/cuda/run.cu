#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <tuple>

#include "../../gpu/launch.cuh"
#include "combine.cuh"
#include "cuda_core.cuh"
#include "decode_kernel.cuh"
#include "kernels.cuh"
#include "run.h"

namespace xla_gpu::paged_attention {
namespace {

constexpr int kCombineSharedBytes = Batch::kSharedInts * sizeof(int);

// Calls use(C()) for the type C of the cache of queries of type T.
template <typename T, typename Use>
auto WithCacheType(const Params& p, const Use& use) {
  if (p.value_cache_dtype == DType::kInt4) return use(Int4OrInt8());
  switch (p.cache_dtype) {
    case DType::kFloat8E4M3:
      return use(Float8E4M3());
    case DType::kFloat8E5M2:
      return use(Float8E5M2());
    case DType::kInt8:
      return use(int8_t());
    case DType::kInt4:
      return use(Int4OrInt8());
    default:
      return use(T());
  }
}

// The kernel with the fewest columns that hold p.head_size.
template <typename T>
AttentionKernel CudaCoreKernel(const Params& p) {
  AttentionKernel kernel;
  WithSmallest(std::integer_sequence<int, XLA_GPU_CUDA_CORE_COLUMNS>(),
               CeilDiv(p.head_size, gpu::kWarpSize), [&](auto columns) {
                 kernel = {
                     {CudaCoreAttention<T, columns>, kThreads, CudaCoreSharedBytes<columns>()},
                     kCoreRows};
               });
  return kernel;
}

// The tensor core kernels copy rows 16 bytes at a time, of int4 8; the Hopper kernel writes 4 bytes
// at a time.
template <typename C>
bool IsAligned(const Params& p) {
  constexpr int64_t kChunk = 16 / sizeof(C);  // numbers
  const int64_t key_chunk = ElementsOf(p.cache_dtype, kChunk);
  const int64_t value_chunk = ElementsOf(p.value_cache_dtype, kChunk);
  for (const int64_t size : {p.head_size, p.value_head_size, p.query_stride}) {
    if (size % kChunk != 0) return false;
  }
  const auto is_multiple = [](const void* address, int64_t num_bytes) {
    return reinterpret_cast<uintptr_t>(address) % num_bytes == 0;
  };
  constexpr int64_t kBytes = sizeof(C);
  return p.cache.StridesAreMultiplesOf(key_chunk, value_chunk) && is_multiple(p.query, 16) &&
         is_multiple(p.output, 16) && is_multiple(p.cache.keys, key_chunk * kBytes) &&
         is_multiple(p.cache.values, value_chunk * kBytes);
}

// Whether the offset of each position in the cache is a 32-bit number of chunks of 16 bytes, as the
// Hopper and decode kernels count them: up to 64 GiB.
template <typename C>
bool FitsChunks(const Params& p) {
  const int64_t last = p.cache.Offset(p.num_blocks - 1, p.block_size - 1);
  return last < int64_t{UINT32_MAX} * (16 / static_cast<int64_t>(sizeof(C)));
}

// The head size that the tensor core kernel of a call must have at least. Wide heads whose V is a
// part of K have a kernel of their own, which is for larger heads than any other.
int64_t TensorCoreHeadSize(const Params& p) {
  const bool is_wide = p.head_size > kMaxColumns;
  return is_wide && p.is_latent ? Larger(p.head_size, kMaxOwnValues + 1) : p.head_size;
}

// Whether the tensor core kernel for heads of this size has room for the V of a call.
bool FitsValues(int head_size, const Params& p) {
  if (head_size > kMaxOwnValues && !p.is_latent) return false;
  return p.value_head_size <= 2 * kMaxColumns;
}

// The kernel of a call whose queries have no other. T: type of the query. C: type of the cache.
template <typename T, typename C>
AttentionKernel KernelFor(const gpu::Device& device, const Params& p) {
  if constexpr (kHasTensorCores<T>) {
    AttentionKernel kernel;
    const auto take = [&](auto head_size) {
      if (FitsValues(head_size, p)) kernel = TensorCoreKernelOf<T, C, head_size>(p);
    };
    if (IsAligned<C>(p)) WithSmallest(TensorCoreHeadSizes<C>(), TensorCoreHeadSize(p), take);
    if (kernel.rows_per_item > 0 && kernel.kernel.shared_bytes <= device.shared_bytes) {
      return kernel;
    }
  }
  return CudaCoreKernel<C>(p);
}

constexpr char kByGpu[] = "by GPU";
constexpr char kPortable[] = "portable";

// Which kernels calls use; null: what the environment names is neither.
std::atomic<const char*>& Chosen() {
  static std::atomic<const char*> chosen{[]() -> const char* {
    const char* name = std::getenv("XLA_GPU_CUDA_KERNELS");
    if (name == nullptr || *name == 0) return kByGpu;
    return name == std::string(kPortable) ? kPortable : nullptr;
  }()};
  return chosen;
}

// Whether calls on the device use the kernels of Hopper GPUs where these apply.
bool UsesHopperKernels(const gpu::Device& device) {
  return Chosen() == kByGpu && device.capability == 90 && HopperHeadSizes<Half>::size() > 0;
}

// Whether a kernel may begin before the one before it has ended: whether it waits for that itself.
bool LaunchesEarly(const gpu::Device& device) {
#ifdef XLA_GPU_LAUNCHES_EARLY
  return device.capability >= 90 && Chosen() != kPortable;
#else
  return false;
#endif
}

// An attention kernel of a call, the sequences that it takes, and whether it waits itself for the
// kernels before it.
struct CallKernel {
  AttentionKernel attention;
  QueryLengths lengths;
  bool waits;
};

// Sets *kernel to the one for queries of more than `few` tokens. Returns whether they have one of
// their own.
template <typename T>
bool FindPrefillKernel(const gpu::Device& device, const Params& p, int64_t few,
                       CallKernel* kernel) {
  if constexpr (kHasTensorCores<T>) {
    if (!UsesHopperKernels(device)) return false;
    kernel->lengths.min = few + 1;
    kernel->waits = true;
    return WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      AttentionKernel& attention = kernel->attention;
      const bool takes_cache =
          !kIs8Bit<C> || (p.ScalesAreUniform() && p.cache.ValuesHaveStridesOfKeys());
      return IsAligned<C>(p) && FitsChunks<C>(p) && takes_cache &&
             WithSmallest(HopperHeadSizes<C>(), p.head_size,
                          [&](auto head_size) { attention = HopperKernelOf<T, C, head_size>(); });
    });
  }
  return false;
}

// The kernel for queries of few tokens. Nothing if they have none of their own.
template <typename T>
std::optional<DecodeKernel> FindDecodeKernel(const gpu::Device& device, const Params& p) {
  std::optional<DecodeKernel> found;
  if constexpr (kHasTensorCores<T>) {
    if (!UsesHopperKernels(device)) return found;
    WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      if (!IsAligned<C>(p) || !FitsChunks<C>(p)) return;
      WithSmallest(DecodeHeadSizes<C>(), p.head_size, [&](auto head_size) {
        found = DecodeKernelOf<T, C, head_size>(p);
        if (found->numbers.group > kDecodeRows) found.reset();
      });
    });
  }
  return found;
}

template <typename T>
gpu::Error Run(const Params& p, const Scratch& scratch, void* stream) {
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  if (Chosen() == nullptr) {
    return {"reading XLA_GPU_CUDA_KERNELS", "it must be portable, or not set"};
  }
  CallKernel prefill{}, others{};
  others.attention =
      WithCacheType<T>(p, [&](auto cache) { return KernelFor<T, decltype(cache)>(device, p); });
  ItemRows item_rows{others.attention.rows_per_item, others.attention.rows_per_item};
  // The decode kernel leaves no queries to others if the Hopper kernel runs: fewer kernels are
  // launched.
  int64_t few = TokensPerTile(p);
  auto decode = FindDecodeKernel<T>(device, p);
  if (decode) {
    few = kDecodeRows / decode->numbers.group;
    others.lengths.min = few + 1;
  }
  prefill.lengths.max = 0;
  if (FindPrefillKernel<T>(device, p, few, &prefill)) {
    prefill.lengths.max = INT64_MAX;
    others.lengths.max = few;
    item_rows.long_rows = prefill.attention.rows_per_item;
  }
  const int64_t longest = p.max_query_len == 0 ? p.num_tokens : p.max_query_len;
  bool follows = false;  // on a kernel of this call
  if (decode) {
    auto& [kernel, numbers] = *decode;
    const int64_t num_items = MaxItems(p, scratch, kDecodeRows);
    int64_t num_blocks = 0;
    if (gpu::Error error = kernel.BlocksFor(device, num_items, &num_blocks)) return error;
    numbers.num_thread_blocks = Divisor(Larger(1, num_blocks));
    kernel.begins_early = LaunchesEarly(device);
    if (gpu::Error error = kernel.Launch(num_blocks, stream, p, scratch, numbers)) {
      return error;
    }
    follows = num_blocks > 0;
  }
  // The kernel for long queries is the last, and never the first: the kernel before sets its
  // counter to zero.
  for (auto [attention, lengths, waits] : {others, prefill}) {
    if (lengths.min > Smaller(lengths.max, longest)) continue;
    const int64_t num_items = MaxItems(p, scratch, attention.rows_per_item);
    attention.kernel.begins_early = waits && LaunchesEarly(device);
    const gpu::Error error =
        attention.kernel.LaunchResident(device, num_items, stream, p, scratch, lengths);
    if (error) return error;
    follows |= num_items > 0;
  }
  const gpu::Kernel<Params, Scratch, ItemRows> finish{Combine<T>, kThreads, kCombineSharedBytes,
                                                      follows && LaunchesEarly(device)};
  const int64_t num_pieces = p.num_heads * CombineParts(p);
  const int64_t num_blocks = CeilDiv(p.num_tokens * num_pieces, kWarps);
  return finish.LaunchResident(device, num_blocks, stream, p, scratch, item_rows);
}

// Kernels for other types of the query are launched as those for this one.
using SomeQuery = std::tuple_element_t<0, std::tuple<XLA_GPU_TENSOR_CORE_TYPES>>;

// Adds how the kernels for a cache of type C are launched.
template <typename C, int... kHeadSizes>
void AddTensorCoreLaunches(std::integer_sequence<int, kHeadSizes...>,
                           std::vector<KernelLaunch>* launches) {
  const auto add = [&](int head_size, const AttentionKernel& attention) {
    if (attention.rows_per_item == 0) return;
    launches->push_back({"TensorCoreAttention", head_size, sizeof(C), attention.warp_rows, kThreads,
                         attention.kernel.shared_bytes});
  };
  Params p = {};
  p.num_heads = p.num_kv_heads = 1;
  for (const int64_t max_query_len : {0, 1}) {  // any query length, and one query token
    p.max_query_len = max_query_len;
    (add(kHeadSizes, TensorCoreKernelOf<SomeQuery, C, kHeadSizes>(p)), ...);
  }
}

template <typename C, int... kHeadSizes>
void AddDecodeLaunches(std::integer_sequence<int, kHeadSizes...>,
                       std::vector<KernelLaunch>* launches) {
  [[maybe_unused]] const auto add = [&](int head_size, const DecodeKernel& decode) {
    launches->push_back({"DecodeAttention", head_size, sizeof(C), 0, decode.kernel.num_threads,
                         decode.kernel.shared_bytes});
  };
  Params p = {};
  p.num_heads = p.num_kv_heads = p.block_size = 1;
  (add(kHeadSizes, DecodeKernelOf<SomeQuery, C, kHeadSizes>(p)), ...);
}

template <typename C, int... kHeadSizes>
void AddHopperLaunches(std::integer_sequence<int, kHeadSizes...>,
                       std::vector<KernelLaunch>* launches) {
  [[maybe_unused]] const auto add = [&](int head_size, const AttentionKernel& attention) {
    launches->push_back({"HopperAttention", head_size, sizeof(C), 0, attention.kernel.num_threads,
                         attention.kernel.shared_bytes});
  };
  (add(kHeadSizes, HopperKernelOf<SomeQuery, C, kHeadSizes>()), ...);
}

template <typename C>
void AddLaunches(std::vector<KernelLaunch>* launches) {
  AddTensorCoreLaunches<C>(TensorCoreHeadSizes<C>(), launches);
  AddDecodeLaunches<C>(DecodeHeadSizes<C>(), launches);
  AddHopperLaunches<C>(HopperHeadSizes<C>(), launches);
}

}  // namespace

std::vector<KernelLaunch> KernelLaunches() {
  std::vector<KernelLaunch> launches = {{"Combine", 0, 0, 0, kThreads, kCombineSharedBytes}};
  for (const int columns : {XLA_GPU_CUDA_CORE_COLUMNS}) {
    Params p = {};
    p.head_size = columns * gpu::kWarpSize;
    const auto& kernel = CudaCoreKernel<float>(p).kernel;
    launches.push_back({"CudaCoreAttention", columns, 0, 0, kThreads, kernel.shared_bytes});
  }
  AddLaunches<SomeQuery>(&launches);
  AddLaunches<int8_t>(&launches);
  return launches;
}

void SetMaxBlocks(int64_t limit) { gpu::MaxBlocks() = limit; }

std::vector<std::string> CudaChoices() { return {kByGpu, kPortable}; }

bool ChooseCuda(const std::string& name) {
  for (const char* choice : {kByGpu, kPortable}) {
    if (name != choice) continue;
    Chosen() = choice;
    return true;
  }
  return false;
}

std::string CudaChoice() { return Chosen() == nullptr ? "unknown" : Chosen().load(); }

std::vector<std::string> CudaKernelsInUse() {
  gpu::Device device;
  if (gpu::Device::Current(&device)) return {};
  if (UsesHopperKernels(device)) return {"decode", "hopper", kPortable};
  return {kPortable};
}

gpu::Error RunOnCuda(const Params& p, const Scratch& scratch, void* stream) {
  return WithTensorType(p.dtype,
                        [&](auto type) { return Run<decltype(type)>(p, scratch, stream); });
}

}  // namespace xla_gpu::paged_attention
