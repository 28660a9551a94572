#include "../../paged_attention/cuda/kernel_choice.cuh"
#include "cuda_core.cuh"
#include "kernels.cuh"
#include "run.h"
#include "small_kernels.cuh"

namespace xla_gpu::varlen_attention {
namespace {

using GradientHeadSizes = std::integer_sequence<int XLA_GPU_GRADIENT_HEAD_SIZES>;
using HopperHeadSizes = std::integer_sequence<int XLA_GPU_HOPPER_GRADIENT_HEAD_SIZES>;
using CudaCoreHeadSizes = std::integer_sequence<int, 128, kMaxGradientHeadSize>;

gpu::Error CopyLengthsOf(const Params& p, const Lengths& lengths, const gpu::Device& device,
                         void* stream) {
  const gpu::Kernel<Params, Lengths> copy{CopyLengths, kThreads, kLengthsSharedBytes};
  return copy.LaunchResident(device, 1, stream, p, lengths);
}

// Whether tensor core kernels can read a call's arrays: they copy rows 16 bytes at a time.
template <typename T>
bool IsAligned(const BackwardParams& b) {
  const Params& p = b.forward;
  constexpr int64_t kChunk = 16 / sizeof(T);
  for (const int64_t size : {p.head_size, p.value_head_size, p.query_stride, b.dout_stride,
                             p.cache.block_stride, p.cache.OffsetOfValue(p.cache.block_stride)}) {
    if (size % kChunk != 0) return false;
  }
  for (const void* array : {p.query, b.dout, static_cast<const void*>(p.cache.keys),
                            static_cast<const void*>(p.cache.values)}) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0) return false;
  }
  return true;
}

template <typename T>
GradientKernels CudaCoreKernelsFor(const Params& p) {
  GradientKernels kernels;
  paged_attention::WithSmallest(CudaCoreHeadSizes(), p.head_size, [&](auto head_size) {
    using Layout = CudaCoreLayout<head_size>;
    const int64_t parts = kBlockTokens / Layout::kRows;
    kernels = {{CudaCoreGradients<T, head_size, true>, kThreads, Layout::kSharedBytes},
               parts,
               {CudaCoreGradients<T, head_size, false>, kThreads, Layout::kSharedBytes},
               parts * p.group.number};
  });
  return kernels;
}

template <typename T>
GradientKernels KernelsFor(const gpu::Device& device, const BackwardParams& b) {
  if constexpr (paged_attention::kHasTensorCores<T>) {
    GradientKernels kernels;
    const auto take_hopper = [&](auto head_size) {
      kernels = sm90::GradientsOf<T, head_size>(b.forward);
    };
    const auto take = [&](auto head_size) {
      kernels = TensorCoreGradientsOf<T, head_size>(b.forward);
    };
    const int64_t size = b.forward.head_size;
    if (IsAligned<T>(b) && !(paged_attention::UsesHopperKernels(device) &&
                             paged_attention::WithSmallest(HopperHeadSizes(), size, take_hopper))) {
      paged_attention::WithSmallest(GradientHeadSizes(), size, take);
    }
    if (kernels.parts_of_keys > 0 && kernels.of_keys.shared_bytes <= device.shared_bytes &&
        kernels.of_queries.shared_bytes <= device.shared_bytes) {
      return kernels;
    }
  }
  return CudaCoreKernelsFor<T>(b.forward);
}

template <typename T>
gpu::Error RunBackward(const BackwardParams& b, const BackwardScratch& scratch, void* stream) {
  const Params& p = b.forward;
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  const GradientKernels kernels = KernelsFor<T>(device, b);
  if (kernels.parts_of_keys == 0) return {"choosing a kernel", "none has gradients of such heads"};
  if (gpu::Error error = CopyLengthsOf(p, scratch.lengths, device, stream)) return error;
  const GradientKernel rows{PrepareRows<T>, kThreads};
  const int64_t row_blocks = CeilDiv(p.num_tokens, kWarps), blocks = MaxBlocks(p) * p.num_kv_heads;
  if (gpu::Error error = rows.LaunchResident(device, row_blocks, stream, b, scratch)) return error;
  if (gpu::Error error = kernels.of_keys.LaunchResident(device, blocks * kernels.parts_of_keys,
                                                        stream, b, scratch)) {
    return error;
  }
  if (gpu::Error error = kernels.of_queries.LaunchResident(
          device, blocks * kernels.parts_of_queries, stream, b, scratch)) {
    return error;
  }
  if (b.dsinks == nullptr && b.dalibi_slopes == nullptr) return {};
  const GradientKernel sum{SumOverTokens, kThreads, kSumSharedBytes};
  return sum.LaunchResident(device, p.num_heads, stream, b, scratch);
}

template <typename T, int... kHeadSizes, int... kHopperSizes>
void AddLaunches(std::integer_sequence<int, kHeadSizes...>,
                 std::integer_sequence<int, kHopperSizes...>,
                 std::vector<paged_attention::KernelLaunch>* launches) {
  [[maybe_unused]] const auto add = [&](int head_size, const GradientKernels& kernels,
                                        const char* of_keys, const char* of_queries) {
    for (const auto& [name, kernel] :
         {std::pair(of_keys, kernels.of_keys), {of_queries, kernels.of_queries}}) {
      launches->push_back({name, head_size, "", 0, kernel.num_threads, kernel.shared_bytes});
    }
  };
  Params p = {};
  p.group = paged_attention::Divisor(1);
  (add(kHeadSizes, TensorCoreGradientsOf<T, kHeadSizes>(p), "TensorCoreKeyGradients",
       "TensorCoreQueryGradients"),
   ...);
  (add(kHopperSizes, sm90::GradientsOf<T, kHopperSizes>(p), "HopperKeyGradients",
       "HopperQueryGradients"),
   ...);
}

}  // namespace

gpu::Error RunForwardOnCuda(Params params, const Lengths& lengths,
                            const std::vector<RowsCopy>& copies, int32_t* tables,
                            const paged_attention::Scratch& scratch, void* stream) {
  gpu::Device device;
  if (gpu::Error error = gpu::Device::Current(&device)) return error;
  if (gpu::Error error = CopyLengthsOf(params, lengths, device, stream)) return error;
  for (const RowsCopy& rows : copies) {
    const auto copy = [&](auto type) {
      using T = decltype(type);
      const gpu::Kernel<const T*, int64_t, int64_t, int64_t, T*> kernel{CopyTokens<T>, kThreads};
      return kernel.LaunchResident(device, CeilDiv(params.num_tokens, kWarps), stream,
                                   static_cast<const T*>(rows.from), rows.stride, rows.columns,
                                   params.num_tokens, static_cast<T*>(rows.to));
    };
    if (gpu::Error error = SizeOf(params.dtype) == 4 ? copy(float()) : copy(Half())) return error;
  }
  params.query_start_loc = params.block_tables = lengths.starts;
  params.context_lens = lengths.lens;
  if (params.prefix_seqs != nullptr) {
    const gpu::Kernel<Params, Lengths, int32_t*> make{MakeTables, kThreads};
    if (gpu::Error error =
            make.LaunchResident(device, params.max_seqs, stream, params, lengths, tables)) {
      return error;
    }
    params.block_tables = tables;
    params.context_lens = lengths.context_lens;
  }
  return paged_attention::RunOnCuda(params, scratch, stream);
}

gpu::Error RunBackwardOnCuda(const BackwardParams& params, const BackwardScratch& scratch,
                             void* stream) {
  return WithTensorType(params.forward.dtype, [&](auto type) {
    return RunBackward<decltype(type)>(params, scratch, stream);
  });
}

std::vector<paged_attention::KernelLaunch> KernelLaunches() {
  std::vector<paged_attention::KernelLaunch> launches = {
      {"CopyLengths", 0, "", 0, kThreads, kLengthsSharedBytes},
      {"CopyTokens", 0, "", 0, kThreads, 0},
      {"MakeTables", 0, "", 0, kThreads, 0},
      {"PrepareRows", 0, "", 0, kThreads, 0},
      {"SumOverTokens", 0, "", 0, kThreads, kSumSharedBytes},
      {"CudaCoreGradients", 128, "", 0, kThreads, CudaCoreLayout<128>::kSharedBytes},
      {"CudaCoreGradients", 256, "", 0, kThreads, CudaCoreLayout<256>::kSharedBytes}};
  using SomeType = std::tuple_element_t<0, std::tuple<XLA_GPU_TENSOR_CORE_TYPES>>;
  AddLaunches<SomeType>(GradientHeadSizes(), HopperHeadSizes(), &launches);
  return launches;
}

}  // namespace xla_gpu::varlen_attention
