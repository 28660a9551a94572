#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "combine.cuh"
#include "decode/zero_arrivals.cuh"
#include "kernel_choice.cuh"
#include "plan.h"
#include "run.h"

namespace xla_gpu::paged_attention {
namespace {

// The kernels of a call, of which a plan launches some. T: type of the query.
template <typename T>
struct Kernels {
  std::optional<sm90::Kernel> hopper;
  std::optional<decode::Kernel> decode;
  std::optional<AttentionKernel> long_portable;
  AttentionKernel portable;
  gpu::Kernel<Params, Scratch, decode::Numbers, int64_t> zero{
      decode::ZeroArrivals, decode::kZeroThreads, decode::kZeroArrivalsSharedBytes};
  gpu::Kernel<Params, Scratch, ItemRows, KvScales> combine{Combine<T>, kThreads,
                                                           kCombineSharedBytes};

  Kernels(const gpu::Device& device, const Params& p)
      : hopper(HopperKernelFor<T>(device, p)),
        decode(DecodeKernelFor<T>(device, p, hopper.has_value())) {
    if (!hopper) long_portable = LongPortableKernelFor<T>(device, p);
    portable = WithCacheType<T>(
        p, [&](auto cache) { return PortableKernelFor<T, decltype(cache)>(device, p); });
  }

  // The rows of a work item of the kernel for long queries; 0: there is none.
  int64_t LongRows() const {
    if (hopper) return hopper->rows_per_item;
    return long_portable ? long_portable->rows_per_item : 0;
  }

  ItemRows RowsOfItems() const {
    const int64_t rows = portable.rows_per_item, long_rows = LongRows();
    return {rows, long_rows > 0 ? long_rows : rows, decode ? decode->numbers.max_query_len : 0};
  }
};

template <typename... Arguments, typename... Given>
gpu::Error Start(gpu::Kernel<Arguments...> kernel, const Launch& launch, const gpu::Device& device,
                 void* stream, const Given&... given) {
  kernel.begins_early = launch.begins_early;
  return kernel.LaunchResident(device, launch.num_blocks, stream, given...);
}

gpu::Error StartDecode(decode::Kernel decode, const Launch& launch, bool is_last,
                       const gpu::Device& device, void* stream, const Params& p,
                       const Scratch& scratch) {
  auto& [kernel, numbers] = decode;
  int64_t num_blocks = 0;
  if (gpu::Error error = kernel.BlocksFor(device, launch.num_blocks, &num_blocks)) return error;
  numbers.num_thread_blocks = Divisor(Larger(1, num_blocks));
  numbers.is_last = is_last;
  kernel.begins_early = launch.begins_early;
  return kernel.Launch(num_blocks, stream, p, scratch, numbers);
}

template <typename T>
gpu::Error Run(const Params& p, const Scratch& scratch, void* stream) {
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  const Kernels<T> kernels(device, p);
  const auto& [hopper, decode, long_portable, portable, zero, combine] = kernels;
  if (portable.rows_per_item == 0) return {"choosing a kernel", "no built one has so wide heads"};
  const Plan plan(p, scratch,
                  {decode ? &decode->numbers : nullptr, portable.rows_per_item, kernels.LongRows(),
                   hopper.has_value(), LaunchesEarly(device)});
  for (const Launch& launch : plan) {
    gpu::Error error;
    switch (launch.step) {
      case Step::kZeroArrivals:
        error = Start(zero, launch, device, stream, p, scratch, decode->numbers,
                      NumArrivals(p, scratch));
        break;
      case Step::kDecode:
        error = StartDecode(*decode, launch, plan.EndsWithDecode(), device, stream, p, scratch);
        break;
      case Step::kPortable:
        error = Start(portable.kernel, launch, device, stream, p, scratch, launch.lengths);
        break;
      case Step::kPortablePrefill:
        error = Start(long_portable->kernel, launch, device, stream, p, scratch, launch.lengths);
        break;
      case Step::kHopperPrefill:
        error = Start(hopper->kernel, launch, device, stream, p, scratch, launch.lengths,
                      sm90::MakeMaps(p));
        break;
      case Step::kCombine:
        error = Start(combine, launch, device, stream, p, scratch, kernels.RowsOfItems(),
                      hopper ? p.v_scale : KvScales{});
        break;
    }
    if (error) return error;
  }
  return {};
}

// Launch sizes do not depend on the type of the query.
using SomeQuery = std::tuple_element_t<0, std::tuple<XLA_GPU_TENSOR_CORE_TYPES>>;

template <typename C>
inline constexpr const char* kNameOf = std::is_same_v<C, Int4OrInt8>   ? "uint8"
                                       : std::is_same_v<C, ScaledCode> ? "codes"
                                       : kIs8Bit<C>                    ? "8 bits"
                                                                       : "16 bits";

// Adds how the kernels of these head sizes are launched; kernel_of(head_size) is one of them. C:
// type of the cache.
template <typename C, int... kHeadSizes, typename KernelOf>
void AddLaunches(const char* name, std::integer_sequence<int, kHeadSizes...>,
                 const KernelOf& kernel_of, std::vector<KernelLaunch>* launches) {
  [[maybe_unused]] const auto add = [&](auto head_size) {
    const auto [kernel, variant] = kernel_of(head_size);
    if (kernel.function == nullptr) return;
    launches->push_back(
        {name, head_size, kNameOf<C>, variant, kernel.num_threads, kernel.shared_bytes});
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
      const auto attention = portable::KernelOf<SomeQuery, C, head_size>(p);
      return std::pair(attention.kernel, attention.variant);
    };
    AddLaunches<C>("TensorCoreAttention", portable::HeadSizes<C>(), tensor_core, launches);
  }
  for (const int shared_bytes : {0, kWideTileBytes}) {  // KV tiles of 32 and of 64 positions
    const gpu::Device device{0, 0, 80, shared_bytes};
    const auto long_queries = [&](auto head_size) {
      const auto attention = portable::PrefillKernelOf<SomeQuery, C, head_size>(device);
      return std::pair(attention.kernel, attention.variant);
    };
    AddLaunches<C>("TensorCorePrefill", portable::HeadSizes<C>(), long_queries, launches);
  }
  const auto add_decode = [&](auto kib) {
    const auto decode = [&](auto head_size) {
      return std::pair(decode::KernelOf<SomeQuery, C, head_size, kib>(p).kernel, kib());
    };
    AddLaunches<C>("DecodeAttention", decode::HeadSizes<C>(), decode, launches);
  };
  add_decode(std::integral_constant<int, decode::kAnyMultiprocessor>());
#ifdef XLA_GPU_HAS_HOPPER_KERNELS
  add_decode(std::integral_constant<int, decode::kLargeMultiprocessor>());
#endif
  const auto prefill = [&](auto head_size) {
    return std::pair(sm90::KernelOf<SomeQuery, C, head_size>(p).kernel, 0);
  };
  AddLaunches<C>("PrefillAttention", sm90::HeadSizes<C>(), prefill, launches);
}

}  // namespace

std::vector<KernelLaunch> KernelLaunches() {
  std::vector<KernelLaunch> launches = {
      {"Combine", 0, "", 0, kThreads, kCombineSharedBytes},
      {"ZeroArrivals", 0, "", 0, decode::kZeroThreads, decode::kZeroArrivalsSharedBytes}};
  for (const int columns : {XLA_GPU_CUDA_CORE_COLUMNS}) {
    Params p = {};
    p.head_size = columns * gpu::kWarpSize;
    const auto& kernel = CudaCoreKernel<float>(p).kernel;
    launches.push_back({"CudaCoreAttention", columns, "", 0, kThreads, kernel.shared_bytes});
  }
  AddLaunches<SomeQuery>(&launches);
  AddLaunches<Int4OrInt8>(&launches);
  AddLaunches<ScaledCode>(&launches);
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
  if (decode::HeadSizes<SomeQuery>::size() > 0) kernels.emplace_back("decode");
  if (UsesHopperKernels(device)) kernels.emplace_back("prefill");
  kernels.emplace_back(kPortable);
  return kernels;
}

gpu::Error RunOnCuda(const Params& params, const Scratch& scratch, void* stream) {
  Params p = params;
  if (p.NeedsFloat32Rows()) {
    // Each side has scales of groups, and one of positions: for groups the global one.
    const auto complete = [](int64_t row_size, GroupScales* groups, KvScales* rows) {
      if (groups->data == nullptr) {
        *groups = InOneGroup(*rows, row_size);
      } else {
        *rows = {groups->global, 0, 0, 0};
      }
    };
    complete(p.head_size, &p.k_groups, &p.k_scale);
    complete(p.value_head_size, &p.v_groups, &p.v_scale);
  }
  return WithTensorType(p.dtype,
                        [&](auto type) { return Run<decltype(type)>(p, scratch, stream); });
}

}  // namespace xla_gpu::paged_attention
