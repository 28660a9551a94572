#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../../environment.h"
#include "../../gpu/launch.cuh"
#include "combine.cuh"
#include "kernels.cuh"
#include "portable/cuda_core.cuh"
#include "run.h"

namespace xla_gpu::paged_attention {
namespace {

// Before the decode kernel, which prepares its shared memory meanwhile.
__global__ void __launch_bounds__(kThreads) ZeroArrivals(int32_t* arrivals, int64_t count) {
  gpu::LetNextKernelBegin();
  gpu::WaitForKernelsBefore();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    arrivals[i] = 0;
  }
}
constexpr int64_t kZerosPerBlock = 8192;  // a block writes them before the decode kernel has begun

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

// The kernel that runs on every GPU. T: type of the query. C: type of the cache.
template <typename T, typename C>
AttentionKernel PortableKernelFor(const gpu::Device& device, const Params& p) {
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

constexpr char kPortable[] = "portable";
enum { kByGpu, kOnlyPortable };  // the numbers of the choices

// Which kernels calls use.
Choice& Chosen() {
  static Choice choice("the choice of CUDA kernels", "XLA_GPU_CUDA_KERNELS", "",
                       {"by GPU", kPortable});
  return choice;
}

// Whether calls on the device use the kernels of Hopper GPUs where these apply.
bool UsesHopperKernels(const gpu::Device& device) {
  return Chosen().index() == kByGpu && device.capability == 90 &&
         PrefillHeadSizes<Half>::size() > 0;
}

// Whether a kernel may begin before the one before it has ended: whether it waits for that itself.
bool LaunchesEarly(const gpu::Device& device) {
#ifdef XLA_GPU_LAUNCHES_EARLY
  return device.capability >= 90 && Chosen().index() != kOnlyPortable;
#else
  return false;
#endif
}

// The kernel of Hopper GPUs for all queries that are not the decode kernel's. Nothing elsewhere.
template <typename T>
std::optional<PrefillKernel> PrefillKernelFor(const gpu::Device& device, const Params& p) {
  std::optional<PrefillKernel> found;
  if constexpr (kHasTensorCores<T>) {
    if (!UsesHopperKernels(device)) return found;
    WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      const bool takes_cache =
          !kIs8Bit<C> || (p.ScalesAreUniform() && p.cache.ValuesHaveStridesOfKeys());
      if (!IsAligned<C>(p) || !OffsetsFit32BitChunks<C>(p) || !takes_cache) return;
      WithSmallest(PrefillHeadSizes<C>(), p.head_size,
                   [&](auto head_size) { found = PrefillKernelOf<T, C, head_size>(p); });
    });
  }
  return found;
}

// The portable kernel for queries of more than one tile. Nothing if they have none of their own.
// Queries of one tile keep TensorCoreAttention. A TensorCorePrefill that left out groups without
// rows took a fifth more instructions for 64 rows, and spilled registers with 8-bit caches. Its
// turns for long queries grew.
template <typename T>
std::optional<AttentionKernel> LongPortableKernelFor(const gpu::Device& device, const Params& p) {
  std::optional<AttentionKernel> found;
  if constexpr (kHasTensorCores<T>) {
    WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      if (!IsAligned<C>(p) || !HeadOffsetsFit32BitChunks<C>(p)) return;
      WithSmallest(TensorCoreHeadSizes<C>(), TensorCoreHeadSize(p), [&](auto head_size) {
        const auto kernel = TensorCorePrefillOf<T, C, head_size>(device);
        if (kernel.rows_per_item > 0) found = kernel;
      });
    });
  }
  return found;
}

// The kernel for queries of few tokens. Nothing if they have none of their own.
template <typename T>
std::optional<DecodeKernel> DecodeKernelFor(const gpu::Device& device, const Params& p) {
  std::optional<DecodeKernel> found;
  if constexpr (kHasTensorCores<T>) {
    WithCacheType<T>(p, [&](auto cache) {
      using C = decltype(cache);
      if (!TakesFewTokens<C>(p)) return;
      WithSmallest(DecodeHeadSizes<C>(), p.head_size, [&](auto head_size) {
#ifdef XLA_GPU_HAS_HOPPER_KERNELS
        if (UsesHopperKernels(device)) {
          found = DecodeKernelOf<T, C, head_size, kLargeMultiprocessor>(p);
          return;
        }
#endif
        found = DecodeKernelOf<T, C, head_size, kAnyMultiprocessor>(p);
      });
    });
  }
  return found;
}

template <typename T>
gpu::Error Run(const Params& p, const Scratch& scratch, void* stream) {
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  auto decode = DecodeKernelFor<T>(device, p);
  const auto prefill = PrefillKernelFor<T>(device, p);
  const auto long_portable = prefill ? std::nullopt : LongPortableKernelFor<T>(device, p);
  const AttentionKernel portable = WithCacheType<T>(
      p, [&](auto cache) { return PortableKernelFor<T, decltype(cache)>(device, p); });
  if (portable.rows_per_item == 0) return {"choosing a kernel", "no built one has so wide heads"};
  // The most tokens of a query that the decode kernel takes, and of one that is not long. On
  // Hopper, what the decode kernel leaves is long: fewer kernels are launched.
  const int64_t few = decode ? FewTokens(p) : 0;
  const int64_t most = decode && prefill ? few : TokensPerTile(p);
  const int64_t longest = p.max_query_len == 0 ? p.num_tokens : p.max_query_len;
  const bool is_alone = decode && longest <= few;  // it computes all sequences
  bool follows = false;                            // on a kernel of this call
  if (decode) {
    auto& [kernel, numbers] = *decode;
    const int64_t num_items = numbers.MaxItems(p);
    int64_t num_blocks = 0;
    if (gpu::Error error = kernel.BlocksFor(device, num_items, &num_blocks)) return error;
    numbers.num_thread_blocks = Divisor(Larger(1, num_blocks));
    numbers.is_last = is_alone;
    if (numbers.HasSplits() && num_blocks > 0) {
      const int64_t count = p.max_seqs * p.num_kv_heads * scratch.arrivals_of_head;
      const gpu::Kernel<int32_t*, int64_t> zero{ZeroArrivals, kThreads, 0, LaunchesEarly(device)};
      const int64_t zero_blocks = CeilDiv(count, kZerosPerBlock);
      if (gpu::Error error =
              zero.LaunchResident(device, zero_blocks, stream, scratch.arrivals, count)) {
        return error;
      }
    }
    kernel.begins_early = LaunchesEarly(device);
    if (gpu::Error error = kernel.Launch(num_blocks, stream, p, scratch, numbers)) {
      return error;
    }
    follows = num_blocks > 0;
    if (is_alone && follows) return {};
  }
  const auto launch = [&](auto attention, const QueryLengths& lengths, bool waits,
                          const auto&... more) -> gpu::Error {
    if (lengths.min > Smaller(lengths.max, longest)) return {};
    const int64_t num_items =
        Smaller(MaxItems(p, scratch, attention.rows_per_item), scratch.num_slots);
    attention.kernel.begins_early = waits && LaunchesEarly(device);
    follows |= num_items > 0;
    return attention.kernel.LaunchResident(device, num_items, stream, p, scratch, lengths, more...);
  };
  const QueryLengths rest{few + 1, prefill || long_portable ? most : INT64_MAX};
  if (gpu::Error error = launch(portable, rest, /*waits=*/false)) return error;
  // The kernel for long queries is never the first: the one before sets its counter to zero.
  ItemRows item_rows{portable.rows_per_item, portable.rows_per_item,
                     decode ? decode->numbers.max_query_len : 0};
  if (prefill) {
    item_rows.long_rows = prefill->rows_per_item;
    if (gpu::Error error = launch(*prefill, {most + 1}, /*waits=*/true, MakePrefillMaps(p))) {
      return error;
    }
  }
  if (long_portable) {
    item_rows.long_rows = long_portable->rows_per_item;
    if (gpu::Error error = launch(*long_portable, {most + 1}, /*waits=*/true)) return error;
  }
  const gpu::Kernel<Params, Scratch, ItemRows> finish{Combine<T>, kThreads, kCombineSharedBytes,
                                                      follows && LaunchesEarly(device)};
  const int64_t num_pieces = p.num_heads * CombineParts(p);
  const int64_t num_blocks = CeilDiv(p.num_tokens * num_pieces, kWarps);
  return finish.LaunchResident(device, num_blocks, stream, p, scratch, item_rows);
}

// Launch sizes do not depend on the type of the query.
using SomeQuery = std::tuple_element_t<0, std::tuple<XLA_GPU_TENSOR_CORE_TYPES>>;

// Adds how the kernels of these head sizes are launched; kernel_of(head_size) is one of them. C:
// type of the cache.
template <typename C, int... kHeadSizes, typename KernelOf>
void AddLaunches(const char* name, std::integer_sequence<int, kHeadSizes...>,
                 const KernelOf& kernel_of, std::vector<KernelLaunch>* launches) {
  [[maybe_unused]] const auto add = [&](auto head_size) {
    const auto [kernel, variant] = kernel_of(head_size);
    if (kernel.function == nullptr) return;
    launches->push_back(
        {name, head_size, sizeof(C), variant, kernel.num_threads, kernel.shared_bytes});
  };
  (add(std::integral_constant<int, kHeadSizes>()), ...);
}

template <typename C>
void AddLaunches(std::vector<KernelLaunch>* launches) {
  Params p = {};
  p.num_heads = p.num_kv_heads = p.block_size = 1;
  p.group = p.block = Divisor(1);
  for (const int64_t max_query_len : {0, 1}) {  // any query length, and one query token
    p.max_query_len = max_query_len;
    const auto tensor_core = [&](auto head_size) {
      const auto attention = TensorCoreKernelOf<SomeQuery, C, head_size>(p);
      return std::pair(attention.kernel, attention.variant);
    };
    AddLaunches<C>("TensorCoreAttention", TensorCoreHeadSizes<C>(), tensor_core, launches);
  }
  for (const int shared_bytes : {0, kWideTileBytes}) {  // KV tiles of 32 and of 64 positions
    const gpu::Device device{0, 0, 80, shared_bytes};
    const auto long_queries = [&](auto head_size) {
      const auto attention = TensorCorePrefillOf<SomeQuery, C, head_size>(device);
      return std::pair(attention.kernel, attention.variant);
    };
    AddLaunches<C>("TensorCorePrefill", TensorCoreHeadSizes<C>(), long_queries, launches);
  }
  const auto add_decode = [&](auto kib) {
    const auto decode = [&](auto head_size) {
      return std::pair(DecodeKernelOf<SomeQuery, C, head_size, kib>(p).kernel, kib());
    };
    AddLaunches<C>("DecodeAttention", DecodeHeadSizes<C>(), decode, launches);
  };
  add_decode(std::integral_constant<int, kAnyMultiprocessor>());
#ifdef XLA_GPU_HAS_HOPPER_KERNELS
  add_decode(std::integral_constant<int, kLargeMultiprocessor>());
#endif
  const auto prefill = [&](auto head_size) {
    return std::pair(PrefillKernelOf<SomeQuery, C, head_size>(p).kernel, 0);
  };
  AddLaunches<C>("PrefillAttention", PrefillHeadSizes<C>(), prefill, launches);
}

}  // namespace

std::vector<KernelLaunch> KernelLaunches() {
  std::vector<KernelLaunch> launches = {{"Combine", 0, 0, 0, kThreads, kCombineSharedBytes},
                                        {"ZeroArrivals", 0, 0, 0, kThreads, 0}};
  for (const int columns : {XLA_GPU_CUDA_CORE_COLUMNS}) {
    Params p = {};
    p.head_size = columns * gpu::kWarpSize;
    const auto& kernel = CudaCoreKernel<float>(p).kernel;
    launches.push_back({"CudaCoreAttention", columns, 0, 0, kThreads, kernel.shared_bytes});
  }
  AddLaunches<SomeQuery>(&launches);
  AddLaunches<Int4OrInt8>(&launches);
  AddLaunches<int8_t>(&launches);
  return launches;
}

void SetMaxBlocks(int64_t limit) { gpu::MaxBlocks() = limit; }

std::vector<std::string> CudaChoices() { return Chosen().names(); }

std::string ChooseCuda(const std::string& name) { return Chosen().Choose(name); }

std::string CudaChoiceError() { return Chosen().error(); }

std::string CudaChoice() { return Chosen().name(); }

std::vector<std::string> CudaKernelsInUse() {
  gpu::Device device;
  if (gpu::Device::Current(&device)) return {};
  std::vector<std::string> kernels;
  if (DecodeHeadSizes<SomeQuery>::size() > 0) kernels.emplace_back("decode");
  if (UsesHopperKernels(device)) kernels.emplace_back("prefill");
  kernels.emplace_back(kPortable);
  return kernels;
}

gpu::Error RunOnCuda(const Params& p, const Scratch& scratch, void* stream) {
  return WithTensorType(p.dtype,
                        [&](auto type) { return Run<decltype(type)>(p, scratch, stream); });
}

}  // namespace xla_gpu::paged_attention
