// Where a thread block of the portable kernels adds up the leaves of its rows: in its slot of the
// scratch, which stays in the L2 cache. Registers hold one leaf.
#pragma once

#include "leaf.cuh"
#include "products.cuh"

namespace xla_gpu::paged_attention {

// A total of the rows that a warp has in kGroups groups of 16. Its threads have places of their own
// in it, so nothing synchronizes them. The states of rows are those of all of their lanes.
template <int kGroups>
class Total {
  static constexpr int kStates = kGroups * 4;  // floats of a thread
  static constexpr int kBlock = gpu::kWarpSize * 4;

 public:
  // `thread`: one of kThreads. num_columns: of V that its warp has, a multiple of 8. most_columns:
  // that any warp has.
  __device__ __forceinline__ Total(float* slot, unsigned thread, int num_columns, int most_columns)
      : num_columns_(num_columns),
        states_(slot + thread * kStates),
        sums_(slot + kThreads * kStates +
              thread / gpu::kWarpSize * (kGroups * kRowsPerWarpTile) * most_columns +
              thread % gpu::kWarpSize * kLaneStep) {}

  // Becomes the part that the registers hold.
  template <typename Products>
  __device__ __forceinline__ void Store(const RowState (&part)[kGroups][2],
                                        const Products (&products)[kGroups]) const {
    StoreStates(part);
    ForSums(products, [](int, const float(&sums)[4], float* to) { StoreNumbers(to, sums); });
  }

  // Adds the part that the registers hold, which was on its right.
  template <typename Products>
  __device__ __forceinline__ void Add(const RowState (&part)[kGroups][2],
                                      const Products (&products)[kGroups]) const {
    RowState states[kGroups][2];
    LoadStates(states);
    const Folds folds(&states, part);
    StoreStates(states);
    Rescale(folds);
    ForSums(products, [&](int g, const float(&sums)[4], float* to) {
      float summands[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        summands[e] = gpu::MultiplyFlushed(sums[e], folds.factors[g][e / 2]);
      }
      AddNumbers(to, summands);
    });
  }

  // Adds the total of a group. `is_first`: becomes it.
  __device__ __forceinline__ void AddGroup(const Total& group, bool is_first) const {
    RowState states[kGroups][2], part[kGroups][2];
    group.LoadStates(part);
    if (is_first) {
      StoreStates(part);
      ForNumbers(group.sums_,
                 [&](int, int at, float(&numbers)[4]) { StoreNumbers(sums_ + at, numbers); });
      return;
    }
    LoadStates(states);
    const Folds folds(&states, part);
    StoreStates(states);
    Rescale(folds);
    ForNumbers(group.sums_, [&](int g, int at, float(&numbers)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        numbers[e] = gpu::MultiplyFlushed(numbers[e], folds.factors[g][e / 2]);
      }
      AddNumbers(sums_ + at, numbers);
    });
  }

  // Adds the total to the part that the registers hold.
  template <typename Products>
  __device__ __forceinline__ void AddTo(RowState (&part)[kGroups][2],
                                        Products (&products)[kGroups]) const {
    RowState states[kGroups][2];
    LoadStates(states);
    const Folds folds(&states, part);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      part[g][0] = states[g][0];
      part[g][1] = states[g][1];
    }
    constexpr int kBlocks = sizeof(products[0].sums) / sizeof(products[0].sums[0]);
#pragma unroll
    for (int first = 0; first < kBlocks; first += kAtOnce) {
      if (first * 8 >= num_columns_) break;
      float totals[kAtOnce][kGroups][4];
      LoadBlocks(sums_, first, totals);
#pragma unroll
      for (int n = first; n < min(first + kAtOnce, kBlocks); ++n) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const float(&total)[4] = totals[n - first][g];
          float(&sums)[4] = products[g].sums[n];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sums[e] = gpu::AddFlushed(gpu::MultiplyFlushed(total[e], folds.before[g][e / 2]),
                                      gpu::MultiplyFlushed(sums[e], folds.factors[g][e / 2]));
          }
        }
      }
    }
  }

 private:
  // Four sums of a lane are adjacent where one instruction adds them in memory. Elsewhere those of
  // a warp's lanes are.
#if __CUDA_ARCH__ >= 900
  static constexpr int kLaneStep = 4;
  static __device__ __forceinline__ void LoadNumbers(const float* from, float (&to)[4]) {
    const float4 numbers = __ldcg(reinterpret_cast<const float4*>(from));
    to[0] = numbers.x, to[1] = numbers.y, to[2] = numbers.z, to[3] = numbers.w;
  }
  static __device__ __forceinline__ void StoreNumbers(float* to, const float (&from)[4]) {
    __stcg(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]));
  }
  static __device__ __forceinline__ void AddNumbers(float* to, const float (&summands)[4]) {
    gpu::AddInMemory(to, summands);
  }
#else
  static constexpr int kLaneStep = 1;
  static __device__ __forceinline__ void LoadNumbers(const float* from, float (&to)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = __ldcg(from + e * gpu::kWarpSize);
  }
  static __device__ __forceinline__ void StoreNumbers(float* to, const float (&from)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) __stcg(to + e * gpu::kWarpSize, from[e]);
  }
  static __device__ __forceinline__ void AddNumbers(float* to, const float (&summands)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) gpu::AddInMemory(to + e * gpu::kWarpSize, summands[e]);
  }
#endif

  __device__ __forceinline__ void LoadStates(RowState (&states)[kGroups][2]) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float4 two = __ldcg(reinterpret_cast<const float4*>(states_) + g);
      states[g][0] = {two.x, two.y};
      states[g][1] = {two.z, two.w};
    }
  }
  __device__ __forceinline__ void StoreStates(const RowState (&states)[kGroups][2]) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const RowState(&two)[2] = states[g];
      __stcg(reinterpret_cast<float4*>(states_) + g,
             make_float4(two[0].max, two[0].sum, two[1].max, two[1].sum));
    }
  }

  // The Fold of each row.
  struct Folds {
    float before[kGroups][2];
    float factors[kGroups][2];
    bool rescale = false;  // some of them

    __device__ __forceinline__ Folds(RowState (*total)[kGroups][2],
                                     const RowState (&part)[kGroups][2]) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Fold fold(&(*total)[g][r], part[g][r]);
          before[g][r] = fold.before;
          factors[g][r] = fold.factor;
          rescale |= fold.Rescales();
        }
      }
    }
  };

  __device__ __forceinline__ void Rescale(const Folds& folds) const {
    if (!gpu::AnyInWarp(folds.rescale)) return;
    ForNumbers(sums_, [&](int g, int at, float(&numbers)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        numbers[e] = gpu::MultiplyFlushed(numbers[e], folds.before[g][e / 2]);
      }
      StoreNumbers(sums_ + at, numbers);
    });
  }

  // Blocks of 8 columns whose sums are on their way from memory together: one after the other, each
  // would take as long as all.
  static constexpr int kAtOnce = 8 / kGroups;

  // Loads the sums of the blocks from `first` on that exist. Others become zeros.
  __device__ __forceinline__ void LoadBlocks(const float* from, int first,
                                             float (&to)[kAtOnce][kGroups][4]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float(&numbers)[4] = to[i][g];
        numbers[0] = numbers[1] = numbers[2] = numbers[3] = 0;
        if ((first + i) * 8 < num_columns_) LoadNumbers(from + At(first + i, g), numbers);
      }
    }
  }
  // Where four sums of a block of columns and a group of rows lie.
  static __device__ __forceinline__ int At(int n, int g) { return (n * kGroups + g) * kBlock; }

  // Calls use(g, at, numbers) for each four sums of a total whose sums begin at `from`.
  template <typename Use>
  __device__ __forceinline__ void ForNumbers(const float* from, const Use& use) const {
#pragma unroll 1
    for (int first = 0; first * 8 < num_columns_; first += kAtOnce) {
      float numbers[kAtOnce][kGroups][4];
      LoadBlocks(from, first, numbers);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if ((first + i) * 8 >= num_columns_) break;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) use(g, At(first + i, g), numbers[i][g]);
      }
    }
  }

  // Calls use(g, sums, place) for four sums of group g at a time, and their place in the slot.
  template <typename Products, typename Use>
  __device__ __forceinline__ void ForSums(Products (&products)[kGroups], const Use& use) const {
    constexpr int kBlocks = sizeof(products[0].sums) / sizeof(products[0].sums[0]);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if (n * 8 >= num_columns_) break;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        use(g, products[g].sums[n], sums_ + At(n, g));
      }
    }
  }

  const int num_columns_;
  float* const states_;
  float* const sums_;
};

// Adds the leaf that the registers hold to the leaves of its group on its left, and the group, once
// it is complete, to those before. After the item's last leaf the registers hold the total. begin:
// the first position of the item's first KV tile. end: that behind the leaf's last one. total(0) is
// the group's, and total(1) that of the groups before.
template <int kGroups, typename Products, typename TotalAt>
__device__ __forceinline__ void EndLeaf(int32_t begin, int32_t end, bool is_last,
                                        RowState (&states)[kGroups][2],
                                        Products (&products)[kGroups], const TotalAt& total) {
  const int32_t group = GroupEnd(end - 1) - kGroup;
  const bool has_groups = begin < group;
  const bool has_leaves = max(begin, group) < LeafBegin(LeafOf(end - 1));
#pragma unroll
  for (int g = 0; g < kGroups; ++g) Softmax::AddLanes(states[g]);
  if (is_last && !has_groups) {
    if (has_leaves) total(0).AddTo(states, products);
    return;
  }
  if (has_leaves) {
    total(0).Add(states, products);
  } else {
    total(0).Store(states, products);
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    states[g][0] = states[g][1] = Softmax::kNoLogits;
    products[g] = Products();
  }
  if (!is_last && end < group + kGroup) return;
  total(1).AddGroup(total(0), /*is_first=*/!has_groups);
  if (is_last) total(1).AddTo(states, products);
}

}  // namespace xla_gpu::paged_attention
