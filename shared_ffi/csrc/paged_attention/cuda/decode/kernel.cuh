// The decode kernel.
#pragma once

#include "../plain_calls.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace xla_gpu::paged_attention::decode {

// Whether the kernel for plain calls computes it.
template <typename Shared>
bool IsPlain(const Params& p, const Numbers& numbers) {
  return IsPlain(p) && numbers.TilesFit31Bits() && (!Shared::kIsLarge || p.ScalesAreUniform());
}

// kIsPlain: see IsPlain. kStripsAreInBlocks: see Numbers.
template <typename T, typename C, int kHeadSize, int kKib, bool kIsPlain, bool kStripsAreInBlocks>
__global__ void __launch_bounds__(kBlockThreads, Shared<T, C, kHeadSize, kKib>::kBlocks)
    DecodeAttention(Params params, Scratch scratch, Numbers numbers) {
  using Shared = decode::Shared<T, C, kHeadSize, kKib>;
  using Schedule =
      Schedule<kIsPlain, Shared::kTile, std::conditional_t<kIsPlain, int32_t, int64_t>>;
  static_assert(sizeof(Shared) <= Shared::kBytes, "a multiprocessor holds kBlocks thread blocks");
  const Params p = kIsPlain ? PlainParams(params, Shared::kIsLarge) : params;
  auto* shared = reinterpret_cast<Shared*>(gpu::SharedMemory());
  const int warp = gpu::Shuffle(static_cast<int>(threadIdx.x / gpu::kWarpSize), 0);
  if (warp < kWarps) shared->Init(kIs8Bit<C> && !Shared::LeavesScaleOut(p));
  gpu::WaitForKernelsBefore();
  XLA_GPU_STAMP(Begin, kStart, threadIdx.x == 0);
  if (!numbers.is_last) gpu::LetNextKernelBegin();
  Schedule schedule(p, scratch, numbers,
                    /*loads=*/warp == kWarps);  // on their way while the others come
  __syncthreads();
  if (warp < kWarps) {
    XLA_GPU_STAMP(Last, kReady, warp == 0);
    Consumer<T, C, kHeadSize, kKib>(p, scratch, numbers, shared).Run();
    XLA_GPU_STAMP(Print, kFinished, threadIdx.x == 0);
    return;
  }
  const auto produce = [&](bool copies_keys) {
    if (copies_keys) schedule.Start();
    Producer<T, C, kHeadSize, kKib, kStripsAreInBlocks>(p, numbers, copies_keys, shared)
        .Run([&](Split* split, int32_t* context, auto stage) {
          if (copies_keys) {
            schedule.Next(split);
            XLA_GPU_STAMP(First, kScheduled, true);
            shared->HandOver(*split, schedule.ContextOfMember(), stage);
          } else {
            shared->Receive(split, context, stage);
          }
        });
  };
  if (!kIsPlain) {
    produce(warp == kWarps);  // the same code for both warps: there is much of it
  } else if (warp == kWarps) {
    produce(true);
  } else {
    produce(false);
  }
}

}  // namespace xla_gpu::paged_attention::decode
