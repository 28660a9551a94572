// The rows that have no work item, where no other kernel writes them: zeros for padding and where
// there is no position to attend to, NaN where lengths are faulty.
#pragma once

#include "../query.cuh"
#include "../state.cuh"
#include "schedule.cuh"

namespace xla_gpu::paged_attention::decode {

// All consumer warps of all thread blocks write a share. Each warp reads the lengths, 32 sequences
// at a time. T: type of the output.
template <typename T>
class OtherRows {
 public:
  __device__ OtherRows(const Params& p, const Numbers& numbers)
      : p_(p), numbers_(numbers), lane_(threadIdx.x % gpu::kWarpSize) {}

  // All lanes of a warp call it. The code that writes rows is there once.
  __device__ void Write() const {
    int32_t num_seqs = gpu::Shuffle(gpu::LoadOnce(p_.num_seqs), 0);
    // A sequence without a valid range of tokens ends the batch.
    bool is_broken = num_seqs < 0 || num_seqs > numbers_.max_seqs;
    if (is_broken) num_seqs = 0;
    Lengths lengths;
    uint32_t others = 0;  // the lanes of this section whose sequences have no items
    int32_t section = 0, batch_end = 0;
    bool is_end = false;
#pragma unroll 1
    do {
      int32_t begin = batch_end, end = numbers_.num_tokens;
      Kind kind = is_broken ? kFaulty : kPadding;
      if (others != 0) {
        const int lane = gpu::FirstOf(others);
        others &= others - 1;
        begin = gpu::Shuffle(lengths.first_token, lane);
        end = gpu::Shuffle(lengths.next_token, lane);
        kind = gpu::Shuffle(lengths.AreLegal(numbers_), lane) ? kNothing : kFaulty;
      } else if (section < num_seqs && !is_broken) {
        lengths = Lengths(p_, numbers_, section + lane_);
        int count = min(gpu::kWarpSize, num_seqs - section);
        const uint32_t broken = gpu::LanesWith(lane_ < count && !lengths.HasRows(numbers_));
        is_broken = broken != 0;
        if (is_broken) count = gpu::FirstOf(broken);
        const bool has_items = lengths.AreLegal(numbers_) && lengths.context_len > 0;
        others = gpu::LanesWith(lane_ < count && lengths.QueryLen() > 0 && !has_items);
        begin = 0;
        end = gpu::Shuffle(lengths.first_token, 0);
        if (section > 0 || count == 0) end = 0;
        const int32_t last_end = gpu::Shuffle(lengths.next_token, max(0, count - 1));
        if (count > 0) batch_end = last_end;
        kind = kPadding;
        section += gpu::kWarpSize;
      } else {
        is_end = true;
      }
      Fill(begin, end, kind);
    } while (!is_end);
  }

 private:
  enum Kind : int { kPadding, kFaulty, kNothing };  // kNothing: there is nothing to attend to

  // Writes the rows of the tokens [begin, end). They are whole chunks of 16 bytes.
  __device__ __forceinline__ void Fill(int32_t begin, int32_t end, Kind kind) const {
    const auto heads = static_cast<uint32_t>(p_.num_heads);  // all rows have 32 bits
    const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / gpu::kWarpSize;
    const float value = kind == kFaulty ? kInfinity - kInfinity : 0;
    const auto pair = gpu::Pack(value, value, T{});
    const auto chunks = static_cast<int>(p_.value_head_size / (16 / sizeof(T)));
#pragma unroll 1
    for (uint64_t row = begin * uint64_t{heads} + warp; row < end * uint64_t{heads};
         row += gridDim.x * kWarps) {
      auto* output = static_cast<FourPairs*>(p_.output) + row * chunks;
#pragma unroll 1
      for (int chunk = lane_; chunk < chunks; chunk += gpu::kWarpSize) {
        output[chunk] = {{pair, pair, pair, pair}};
      }
      if (p_.lse == nullptr || lane_ > 0) continue;
      const uint32_t head = static_cast<uint32_t>(row) % heads;
      const float lse = p_.Lse(head, SinkOf(p_, head) * kLn2);
      p_.lse[row] = kind == kNothing ? lse : kind == kFaulty ? value : -kInfinity;
    }
  }

  const Params& p_;
  const Numbers& numbers_;
  const int lane_;
};

}  // namespace xla_gpu::paged_attention::decode
