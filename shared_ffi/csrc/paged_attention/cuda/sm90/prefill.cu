// Compiled for sm_90a only, once for each type of query, type of cache and head size.
#include "../kernels.cuh"
#include "../plain_calls.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace xla_gpu::paged_attention::sm90 {

// kIsPlain: for calls that IsPlain alone.
template <typename T, typename C, int kHeadSize, bool kIsPlain>
__global__ void __launch_bounds__(kBlockThreads, 1)
    PrefillAttention(Params params, Scratch scratch, QueryLengths lengths,
                     const __grid_constant__ Maps maps) {
  const Params p = kIsPlain ? PlainParams(params, /*scales_are_uniform=*/true) : params;
  using Shared = sm90::Shared<T, C, kHeadSize>;
  using Registers = sm90::Registers<C, kHeadSize>;
  auto* shared = reinterpret_cast<Shared*>(gpu::SharedMemory());
  if (gpu::Opaque(threadIdx.x) == 0) shared->Init();
  gpu::LetNextKernelBegin();
  __syncthreads();
  const int warpgroup = gpu::Shuffle(static_cast<int>(threadIdx.x / kThreads), 0);  // uniform
  if (warpgroup == 0) {
    gpu::GiveRegistersBack<Registers::kProducer>();
    Producer<T, C, kHeadSize>(p, scratch, maps, shared).Run(lengths);
  } else {
    gpu::TakeRegisters<Registers::kConsumer>();
    const int consumer = warpgroup - 1;
    shared->values_barriers.Free({});  // the place that is skipped
    typename Shared::TileState tile;
    gpu::WaitForKernelsBefore();
    // The first turn to start products is the first consumer's.
    if (consumer > 0) gpu::ArriveThreads(kTurnBarrier, kConsumers * kThreads);
    for (uint32_t n = 0;;) {
      const auto stage = Shared::ItemState::Of(n);
      shared->items_barriers.WaitFilled(stage);
      const Work& work = shared->work[stage.index][consumer];
      if (work.item.num_rows == -1) break;
      Consumer<T, C, kHeadSize>(p, scratch, work, consumer, maps, shared).Compute(&tile);
      const uint32_t number = work.number;  // n, for which there was no register
      shared->items_barriers.Free(Shared::ItemState::Of(number));
      n = number + 1;
    }
    if (consumer == 0) gpu::SyncThreads(kTurnBarrier, kConsumers * kThreads);  // a turn too many
  }
}

template <>
Kernel KernelOf<XLA_GPU_STORAGE, XLA_GPU_CACHE, XLA_GPU_HEAD_SIZE>(const Params& p) {
  using T = XLA_GPU_STORAGE;
  using C = XLA_GPU_CACHE;
  auto* kernel = PrefillAttention<T, C, XLA_GPU_HEAD_SIZE, false>;
  // Kernels of caches of 8 bits compute all calls: fewer are compiled.
  if constexpr (!kIs8Bit<C>) {
    if (IsPlain(p)) kernel = PrefillAttention<T, C, XLA_GPU_HEAD_SIZE, true>;
  }
  constexpr int kBytes = sizeof(Shared<T, C, XLA_GPU_HEAD_SIZE>);
  return {{kernel, kBlockThreads, kBytes}, kItemRows};
}

}  // namespace xla_gpu::paged_attention::sm90
