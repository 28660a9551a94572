// The kernel before the decode kernel, which prepares its shared memory meanwhile. It sets that
// kernel's counters to 0, and finds which sequences have their first positions in common.
//
// Sequences that are neighbours in the batch and have their first leaves in common are a family, as
// long as one work item of the decode kernel can have all of their rows. Two have a position in
// common if both read the same slot there, by their block tables.
#pragma once

#include "schedule.cuh"

namespace xla_gpu::paged_attention::decode {

static_assert(kSection == gpu::kWarpSize, "a lane joins each sequence, and a warp compares it");
inline constexpr int kZeroThreads = kSection * gpu::kWarpSize;
inline constexpr int kZeroArrivalsSharedBytes = kSection * sizeof(int32_t);

// How many of its positions, from the first on, a sequence has in common with the one before it,
// whose context may end earlier. All lanes of the warp call it.
__device__ inline int32_t CommonPositions(const Params& p, int64_t s) {
  constexpr int kIds = 16;  // of a lane, whose loads are on their way together
  const int32_t* ids = p.block_tables + s * p.max_blocks_per_seq;
  const int32_t* ids_before = ids - p.max_blocks_per_seq;
  const int32_t positions = max(0, gpu::LoadOnce(p.context_lens + s));  // with the first ids
  if (gpu::LoadOnce(ids) != gpu::LoadOnce(ids_before)) return 0;        // most share nothing
  const auto num_ids =
      static_cast<uint32_t>(Smaller(p.max_blocks_per_seq, CeilDiv(positions, p.block_size)));
  uint32_t same = 0;  // block ids from the first on
#pragma unroll 1
  for (uint32_t begin = 0; begin == same && begin < num_ids; begin += kIds * gpu::kWarpSize) {
    int32_t differ[kIds];
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const uint32_t at = begin + i * gpu::kWarpSize + threadIdx.x % gpu::kWarpSize;
      differ[i] = at < num_ids ? ids[at] ^ ids_before[at] : 1;
    }
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const uint32_t others = gpu::LanesWith(differ[i] != 0);
      const bool is_next = same == begin + i * gpu::kWarpSize;  // all before are the same
      if (is_next) same += others == 0 ? gpu::kWarpSize : gpu::FirstOf(others);
    }
  }
  return static_cast<int32_t>(Smaller(positions, same * p.block_size));
}

// What Scratch::families has of the lane's sequence. common: with the one before it.
__device__ inline int32_t JoinFamilies(const Numbers& numbers, const Lengths& lengths, bool exists,
                                       int32_t common) {
  if (!gpu::AnyInWarp(common >= kShortLeaf)) return kAllKept;
  const int lane = threadIdx.x % gpu::kWarpSize;
  const int32_t q_len = exists && lengths.AreLegal(numbers) ? lengths.QueryLen() : 0;
  // The positions that all of its rows attend to, if they attend to the first.
  int32_t attended = lengths.context_len - q_len;
  if (q_len == 0 || numbers.WindowBegin(lengths.context_len - 1) > 0) attended = 0;
  const int32_t attended_by_both = min(attended, gpu::ShuffleUp(attended, 1));
  int32_t joined = LeafBegin(LeafOf(min(common, attended_by_both)));
  if (gpu::ShuffleUp(q_len, 1) != q_len || lane == 0) joined = 0;
  // One that has far less in common than its neighbours is the first of another family.
  const int32_t beside = max(gpu::ShuffleUp(joined, 1), gpu::ShuffleDown(joined, 1));
  const uint32_t firsts = gpu::LanesWith(joined == 0 || joined < beside / 2);
  const int32_t most = numbers.tokens_of_item / max(q_len, 1);
  const int32_t place = __clz(firsts << (gpu::kWarpSize - 1 - lane)) % max(most, 1);
  const int first = lane - place;
  const uint32_t behind = gpu::LanesWith(place == 0) >> first >> 1;
  const int32_t members = min(gpu::FirstOf(behind) + 1, gpu::kWarpSize - first);
  int32_t end = place == 0 ? INT32_MAX : joined;
#pragma unroll 1
  for (int delta = 1; delta < kItemRows; delta *= 2) {
    const int32_t of_others = gpu::ShuffleDown(end, delta);
    if (place + delta < members) end = min(end, of_others);
  }
  end = gpu::Shuffle(end, first);
  const int32_t beside_alone = max(common, gpu::ShuffleDown(common, 1));
  if (members == 1) return beside_alone / kShortLeaf * kShortLeaf;
  return end | (place > 0 ? kFollows : 0);
}

// count: of the counters.
__global__ void __launch_bounds__(kZeroThreads)
    ZeroArrivals(Params p, Scratch scratch, Numbers numbers, int64_t count) {
  gpu::LetNextKernelBegin();
  gpu::WaitForKernelsBefore();
  const int64_t step = int64_t{gridDim.x} * kZeroThreads;
  for (int64_t i = int64_t{blockIdx.x} * kZeroThreads + threadIdx.x; i < count; i += step) {
    scratch.arrivals[i] = 0;
  }
  auto* common = reinterpret_cast<int32_t*>(gpu::SharedMemory());
  const int lane = threadIdx.x % gpu::kWarpSize, warp = threadIdx.x / gpu::kWarpSize;
  for (int64_t section = int64_t{blockIdx.x} * kSection; section < numbers.max_seqs;
       section += int64_t{gridDim.x} * kSection) {
    int32_t num_seqs = 0;
    Lengths lengths;
    const auto s = static_cast<int32_t>(section) + lane;
    if (warp == 0) {
      num_seqs = gpu::LoadOnce(p.num_seqs);
      lengths = Lengths(p, numbers, s);
    }
    const int64_t of_warp = section + warp;
    const bool compares = 0 < of_warp && of_warp < numbers.max_seqs && numbers.tokens_of_item > 0;
    const int32_t found = compares ? CommonPositions(p, of_warp) : 0;
    if (lane == 0) common[warp] = found;
    __syncthreads();
    if (warp == 0) {
      const int32_t family = JoinFamilies(numbers, lengths, s < num_seqs, common[lane]);
      if (s < numbers.max_seqs) scratch.families[s] = family;
    }
    __syncthreads();  // the numbers have been read
  }
}

}  // namespace xla_gpu::paged_attention::decode
