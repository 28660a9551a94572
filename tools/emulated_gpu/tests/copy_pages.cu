// A kernel as nvcc compiles it that copies pages by a tensor map, which is a parameter or in global
// memory, and the host code that makes the map.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cuda/ptx>

namespace ptx = cuda::ptx;

constexpr int kPage = 16, kPages = 8, kColumns = 128;           // of 2 bytes
constexpr int kHalf = kPages * kPage * 128, kTile = 2 * kHalf;  // bytes

// Each of 16 threads copies half of a page: 64 columns. The halves of the tile lie one after the
// other.
__global__ void CopyPages(const __grid_constant__ CUtensorMap parameter, const CUtensorMap* memory,
                          bool fences, const int* numbers, int head, uint4* output) {
  extern __shared__ __align__(1024) char tile[];
  __shared__ alignas(16) int pages[kPages];
  __shared__ uint64_t filled, numbered;
  const CUtensorMap* map = memory == nullptr ? &parameter : memory;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    ptx::mbarrier_init(&filled, 1);
    ptx::mbarrier_init(&numbered, 1);
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  }
  __syncthreads();
  if (thread == 0) {
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, pages, numbers, sizeof(pages),
                       &numbered);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &numbered,
                                   sizeof(pages));
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &filled,
                                   kTile);
  }
  if (fences)
    ptx::fence_proxy_tensormap_generic(ptx::sem_acquire, ptx::scope_sys, map, ptx::n32_t<128>{});
  if (thread < 2 * kPages) {
    while (!ptx::mbarrier_try_wait_parity(&numbered, 0)) {
    }
    const int half = thread / kPages, page = thread % kPages;
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global,
                              tile + half * kHalf + page * kPage * 128, map,
                              {half * 64, 0, head, pages[page]}, &filled);
  }
  while (!ptx::mbarrier_try_wait_parity(&filled, 0)) {
  }
  for (int k = thread; k < kTile / 16; k += static_cast<int>(blockDim.x)) {
    output[k] = reinterpret_cast<const uint4*>(tile)[k];
  }
}

extern "C" const char* Message(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// cache: [num_pages, kPage, num_heads, kColumns]. Returns the first call's error, or 0. The next
// call overwrites the map: one in memory must have been read by then.
extern "C" int Run(void* cache, uint64_t num_pages, uint64_t num_heads, const int* pages, int head,
                   void* output, bool in_memory, bool fences, cudaStream_t stream) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (const int error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled",
                                                         reinterpret_cast<void**>(&encode), 12000,
                                                         cudaEnableDefault, &found)) {
    return error;
  }
  const cuuint64_t row = kColumns * 2;
  const cuuint64_t sizes[] = {kColumns, kPage, num_heads, num_pages};
  const cuuint64_t strides[] = {num_heads * row, row, kPage * num_heads * row};
  const cuuint32_t box[] = {64, kPage, 1, 1}, steps[] = {1, 1, 1, 1};
  static CUtensorMap map;
  if (const int error =
          encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, cache, sizes, strides, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
    return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = 1;
  config.blockDim = 128;
  config.dynamicSmemBytes = kTile;
  config.stream = stream;
  const CUtensorMap* memory = in_memory ? &map : nullptr;  // on a GPU, a copy of it
  return cudaLaunchKernelEx(&config, CopyPages, map, memory, fences, pages, head,
                            static_cast<uint4*>(output));
}
