// How long each way of copying a paged cache into shared memory takes, without any attention: what
// the decode kernel can reach at best. And what single instructions of the other kernels take.
// Prints JSON: microseconds by call and way of copying, bytes a cycle by size of box, and cycles.
//
// A thread block has the decode kernel's shape: a ring of tiles with K and V of a few positions,
// producer warps that fill it, and four warps that take the tiles in turn. Two blocks share a
// multiprocessor. Pages lie scattered; calls go round among caches that together exceed L2.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gpu/barrier.cuh"

namespace {

namespace gpu = xla_gpu::gpu;
using gpu::kWarpSize;
using gpu::SharedAddress;

constexpr int kKvHeads = 8;
constexpr int kRowBytes = 256;  // of K of a position: a head of 128 in 16 bits
constexpr int kTileBytes = 8192;
constexpr int kStages = 8;
constexpr int kConsumers = 4;  // warps
constexpr int kThreads = (kConsumers + 2) * kWarpSize;
constexpr int kIdsAhead = 8;  // tiles whose page ids are loaded at a time
// As much as the decode kernel takes, so that two blocks share a multiprocessor.
constexpr int kSharedBytes = 100 * 1024;
constexpr int64_t kPoolBytes = int64_t{4} << 30;
constexpr int kRounds = 7;

enum class Way { kCpAsync, kBoxOfBoth, kBoxOfEach, kRowOfEach };

constexpr Way kWays[] = {Way::kCpAsync, Way::kBoxOfBoth, Way::kBoxOfEach, Way::kRowOfEach};

const char* NameOf(Way way) {
  switch (way) {
    case Way::kCpAsync:
      return "A cp.async";
    case Way::kBoxOfBoth:
      return "B a box of K and V";
    case Way::kBoxOfEach:
      return "C a box of K, one of V";
    case Way::kRowOfEach:
      return "E a bulk row of K, one of V";
  }
  return "";
}

constexpr __host__ __device__ bool HasBoxes(Way way) {
  return way == Way::kBoxOfBoth || way == Way::kBoxOfEach;
}

void Check(cudaError_t status, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "copies.cu:%d: %s\n", line, cudaGetErrorString(status));
  std::exit(1);
}
#define CHECK(call) Check(call, __LINE__)

// A cache [blocks, page, kv heads, K and V, row bytes] and the tables of its sequences.
struct Cache {
  const char* data;
  const int* tables;  // [sequences, pages]
  int pages;          // of a sequence
  int page_shift;     // log2 of the positions of a page
  int tiles_of_item;  // an item is a kv head of a sequence
  int tiles;          // of all items
  int box_rows;       // positions of a tensor copy
  uint64_t* sum;      // of the tiles' words; null: they are not read
};

struct Ring {
  alignas(1024) char tiles[kStages][kTileBytes];  // the swizzle of tensor copies needs 1024
  gpu::Barrier filled[kStages];
  gpu::Barrier freed[kStages];
};
static_assert(sizeof(Ring) <= kSharedBytes);

__device__ __forceinline__ void CopyRow(char* to, const char* from, int bytes,
                                        gpu::Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

__device__ __forceinline__ void CopyBox(char* to, const CUtensorMap* map, int row, int half,
                                        int head, int block, gpu::Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(0), "r"(row), "r"(half), "r"(head), "r"(block), "r"(SharedAddress(barrier))
      : "memory");
}

// The tiles of a thread block: neighbours, about as many as every other block has.
struct Share {
  int begin, count;

  __device__ explicit Share(int tiles) {
    const int least = tiles / gridDim.x, more = tiles - least * gridDim.x, block = blockIdx.x;
    begin = least * block + min(block, more);
    count = least + (block < more ? 1 : 0);
  }
};

// One producer warp.
template <Way kWay>
__device__ __forceinline__ void Produce(const Cache& cache, Ring& ring, Share share, bool is_value,
                                        const CUtensorMap* map) {
  constexpr int kRows = kTileBytes / 2 / kRowBytes;
  constexpr int64_t kPositionBytes = int64_t{2} * kKvHeads * kRowBytes;
  constexpr int kHalves = kRowBytes / 128;  // swizzled columns of K, and of V
  const int lane = threadIdx.x % kWarpSize;
  const int in_page_mask = (1 << cache.page_shift) - 1;
  const auto page_of = [&](int n) {  // of this lane's row of a tile
    const int tile = share.begin + min(n, share.count - 1), item = tile / cache.tiles_of_item;
    const int position = (tile - item * cache.tiles_of_item) * kRows + lane % kRows;
    return cache.tables[item / kKvHeads * cache.pages + (position >> cache.page_shift)];
  };
  int next[kIdsAhead];
#pragma unroll
  for (int i = 0; i < kIdsAhead; ++i) next[i] = page_of(i);
  for (int first = 0; first < share.count; first += kIdsAhead) {
    int ids[kIdsAhead];
#pragma unroll
    for (int i = 0; i < kIdsAhead; ++i) ids[i] = next[i];
    if (first + kIdsAhead < share.count) {
#pragma unroll
      for (int i = 0; i < kIdsAhead; ++i) next[i] = page_of(first + kIdsAhead + i);
    }
#pragma unroll
    for (int i = 0; i < kIdsAhead; ++i) {
      const int n = first + i;
      if (n >= share.count) break;
      const int tile = share.begin + n, item = tile / cache.tiles_of_item;
      const int head = item % kKvHeads;
      const int position = (tile - item * cache.tiles_of_item) * kRows + lane % kRows;
      const int in_page = position & in_page_mask;
      const int64_t row = (int64_t{ids[i]} << cache.page_shift) + in_page;
      char* const to = ring.tiles[n % kStages];
      gpu::Barrier* const filled = &ring.filled[n % kStages];
      gpu::WaitForPhase(&ring.freed[n % kStages], n / kStages % 2 ^ 1);
      if constexpr (kWay == Way::kCpAsync) {
        constexpr int kChunks = kRowBytes / 16, kRowsAtOnce = kWarpSize / kChunks;
        const int chunk = lane % kChunks;
#pragma unroll
        for (int begin = 0; begin < kRows; begin += kRowsAtOnce) {
          const int r = begin + lane / kChunks;
          const int64_t from = __shfl_sync(~0u, row, r);
          const int place = chunk / 8 * (kRows * 128) + r * 128 + ((chunk % 8) ^ (r % 8)) * 16;
          gpu::CopyAsync16(
              to + is_value * (kTileBytes / 2) + place,
              cache.data + from * kPositionBytes + (head * 2 + is_value) * kRowBytes + chunk * 16,
              true);
        }
        gpu::ArriveAfterCopies(filled);
      } else {
        if (lane == 0) gpu::ArriveExpecting(filled, kTileBytes);
        __syncwarp();
        if constexpr (HasBoxes(kWay)) {
          if (lane < kRows && lane % cache.box_rows == 0) {
            // A box of fewer rows than the tile is a part of its own.
            constexpr int kBoxBytes = kHalves * 128;  // of a row
            if constexpr (kWay == Way::kBoxOfBoth) {
              CopyBox(to + lane * 2 * kBoxBytes, map, in_page, 0, head, ids[i], filled);
            } else {
              char* const part = to + lane * kBoxBytes;
              CopyBox(part, map, in_page, 0, head, ids[i], filled);
              CopyBox(part + kTileBytes / 2, map, in_page, kHalves, head, ids[i], filled);
            }
          }
        } else if (lane < kRows) {
          const char* from = cache.data + row * kPositionBytes + head * 2 * kRowBytes;
          CopyRow(to + lane * kRowBytes, from, kRowBytes, filled);
          CopyRow(to + kTileBytes / 2 + lane * kRowBytes, from + kRowBytes, kRowBytes, filled);
        }
        __syncwarp();
      }
    }
  }
  if constexpr (kWay == Way::kCpAsync) {
    gpu::CommitCopies();
    gpu::WaitCopies<0>();
  }
}

__device__ __forceinline__ void Consume(const Cache& cache, Ring& ring, Share share, int warp) {
  const int lane = threadIdx.x % kWarpSize;
  uint64_t sum = 0;
  for (int n = warp; n < share.count; n += kConsumers) {
    gpu::WaitForPhase(&ring.filled[n % kStages], n / kStages % 2);
    if (cache.sum != nullptr) {
      const auto* words = reinterpret_cast<const uint32_t*>(ring.tiles[n % kStages]);
      for (int i = lane; i < kTileBytes / 4; i += kWarpSize) sum += words[i];
    }
    __syncwarp();
    if (lane == 0) gpu::Arrive(&ring.freed[n % kStages]);
  }
  if (cache.sum != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(cache.sum),
              static_cast<unsigned long long>(sum));
  }
}

template <Way kWay>
__global__ void __launch_bounds__(kThreads, 2)
    CopyCache(Cache cache, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) char memory[];
  Ring& ring = *reinterpret_cast<Ring*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      gpu::InitBarrier(&ring.filled[i], kWay == Way::kCpAsync ? 2 * kWarpSize : 1);
      gpu::InitBarrier(&ring.freed[i], 1);
    }
    gpu::FenceBarriers();
  }
  __syncthreads();
  const int warp = threadIdx.x / kWarpSize;
  const Share share(cache.tiles);
  if (share.count == 0) return;
  if (warp < kConsumers) {
    Consume(cache, ring, share, warp);
  } else if (kWay == Way::kCpAsync || warp == kConsumers) {
    Produce<kWay>(cache, ring, share, warp > kConsumers, &map);
  }
}

// One warp of each multiprocessor asks for boxes of 128 bytes of kRows positions, from pages that
// L2 holds, as the producer of the prefill kernel does. Writes the cycles of each block.
constexpr int kProbeStages = 3, kProbeBytes = 32 * 1024, kProbeTiles = 512, kProbePositions = 4096;

template <int kRows>
__global__ void CopyBoxes(const __grid_constant__ CUtensorMap map, int64_t* cycles) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ gpu::Barrier filled[kProbeStages];
  constexpr int kBoxBytes = kRows * 128, kBoxes = kProbeBytes / kBoxBytes;
  if (threadIdx.x == 0) {
    for (gpu::Barrier& barrier : filled) gpu::InitBarrier(&barrier, 1);
    gpu::FenceBarriers();
  }
  __syncwarp();
  const int64_t start = clock64();
  for (int n = 0; n < kProbeTiles + kProbeStages; ++n) {
    const int stage = n % kProbeStages;
    if (n >= kProbeStages) gpu::WaitForPhase(&filled[stage], n / kProbeStages % 2 ^ 1);
    if (n >= kProbeTiles) continue;
    if (threadIdx.x == 0) gpu::ArriveExpecting(&filled[stage], kProbeBytes);
    __syncwarp();
    for (int box = threadIdx.x; box < kBoxes; box += kWarpSize) {
      const uint32_t block = (n * kBoxes + box + blockIdx.x * 977) * 2654435761u >> 8;
      CopyBox(memory + stage * kProbeBytes + box * kBoxBytes, &map, 0, box % 4, box % kKvHeads,
              block % (kProbePositions / kRows), &filled[stage]);
    }
    __syncwarp();
  }
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
}

enum class Work { kMma, kLoadMatrices, kLoadAndCopy, kAddInMemory };
constexpr int kWorkWarps = 8, kWorkTurns = 2000;

// The instructions of the portable kernels, by all warps of a multiprocessor.
template <Work kWork>
__global__ void Repeat(const char* from, int64_t* cycles, float* out) {
  extern __shared__ __align__(1024) char memory[];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  char* const place = memory + warp * 4096 + lane * 16;
  float sums[4][4] = {};
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = 0x3f803f80 + lane * 0x10003 + i;  // zeros take less power
  __syncthreads();
  const int64_t start = clock64();
  for (int turn = 0; turn < kWorkTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kWork == Work::kMma) {
        gpu::MultiplyAdd(sums[i], words, words[0], words[1], xla_gpu::BFloat16{});
      } else if constexpr (kWork == Work::kAddInMemory) {  // to memory that the L2 cache holds
        const int row = (blockIdx.x * kWorkWarps + warp) * 4 + i;
        gpu::AddInMemory(out + (1 << 20) + row * 128 + lane * 4, sums[i]);
      } else {
        uint32_t loaded[4];
        gpu::LoadMatrices(loaded, place + i * 512);
        words[i] ^= loaded[0] ^ loaded[1] ^ loaded[2] ^ loaded[3];
        if constexpr (kWork == Work::kLoadAndCopy) {
          gpu::CopyAsync16(place + 2048 + i * 512, from + (warp * 4 + i) * 512 + lane * 16, true);
        }
      }
    }
    gpu::CommitCopies();
    gpu::WaitCopies<4>();
  }
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      sums[0][0] + sums[1][1] + sums[2][2] + sums[3][3] + words[0] + words[1] + words[2] + words[3];
}

__global__ void Fill(uint32_t* words, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u;
    x ^= x >> 15;
    words[i] = x * 2246822519u;
  }
}

struct Call {
  int sequences, context, page;

  std::string Name() const {
    return std::to_string(sequences) + " x " + std::to_string(context) + ", pages of " +
           std::to_string(page);
  }

  int64_t Bytes() const { return int64_t{2} * sequences * context * kKvHeads * kRowBytes; }

  int64_t Blocks() const { return int64_t{sequences} * context / page; }
};

std::vector<Call> Calls() {
  std::vector<Call> calls;
  for (const int page : {16, 1, 8}) {
    for (const int sequences : {1, 32}) calls.push_back({sequences, 8192, page});
  }
  return calls;
}

// Whether a way of copying serves a call: boxes need pages of several positions.
bool Serves(Way way, const Call& call) { return !HasBoxes(way) || call.page >= 8; }

class Gpu {
 public:
  Gpu() {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &found));
    encode_ = reinterpret_cast<decltype(encode_)>(entry);
    CHECK(cudaGetDeviceProperties(&device_, 0));
    CHECK(cudaMalloc(&pool_, kPoolBytes));
    CHECK(cudaMalloc(&sum_, sizeof(*sum_)));
    CHECK(cudaStreamCreate(&stream_));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
    Fill<<<1024, 256, 0, stream_>>>(reinterpret_cast<uint32_t*>(pool_), kPoolBytes / 4);
    CHECK(cudaGetLastError());
  }

  // The median time of a call in microseconds, and the sum of what was copied.
  template <Way kWay>
  std::pair<float, uint64_t> Measure(const Call& call) {
    constexpr int kRows = kTileBytes / 2 / kRowBytes;
    std::vector<int> table(call.Blocks());
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    int* tables;
    CHECK(cudaMalloc(&tables, table.size() * sizeof(int)));
    CHECK(cudaMemcpy(tables, table.data(), table.size() * sizeof(int), cudaMemcpyHostToDevice));
    auto* const kernel = CopyCache<kWay>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    const int tiles = call.sequences * kKvHeads * (call.context / kRows);
    const auto launch = [&](int copy, uint64_t* sum) {
      char* const data = pool_ + copy * call.Bytes();
      const int box_rows = std::min(call.page, kRows);
      CUtensorMap map = {};
      const int columns = kRowBytes / 128 * (kWay == Way::kBoxOfBoth ? 2 : 1);
      if (HasBoxes(kWay)) map = MapOf(data, call, box_rows, columns);
      const Cache cache = {data,
                           tables,
                           call.context / call.page,
                           __builtin_ctz(call.page),
                           call.context / kRows,
                           tiles,
                           box_rows,
                           sum};
      const int blocks = std::min(2 * device_.multiProcessorCount, tiles);
      kernel<<<blocks, kThreads, kSharedBytes, stream_>>>(cache, map);
      CHECK(cudaGetLastError());
    };
    CHECK(cudaMemsetAsync(sum_, 0, sizeof(*sum_), stream_));
    launch(0, sum_);
    uint64_t sum;
    CHECK(cudaMemcpyAsync(&sum, sum_, sizeof(sum), cudaMemcpyDeviceToHost, stream_));
    CHECK(cudaStreamSynchronize(stream_));

    const int64_t past_the_cache = 2 * int64_t{device_.l2CacheSize} / call.Bytes();
    const int calls = static_cast<int>(std::clamp<int64_t>(past_the_cache, 8, 64));
    const int copies = static_cast<int>(std::min<int64_t>(calls, kPoolBytes / call.Bytes()));
    cudaGraph_t graph;
    cudaGraphExec_t program;
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < calls; ++i) launch(i % copies, nullptr);
    CHECK(cudaStreamEndCapture(stream_, &graph));
    CHECK(cudaGraphInstantiate(&program, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < kRounds + 2; ++i) {
      CHECK(cudaEventRecord(begin_, stream_));
      CHECK(cudaGraphLaunch(program, stream_));
      CHECK(cudaEventRecord(end_, stream_));
      CHECK(cudaStreamSynchronize(stream_));
      float milliseconds;
      CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
      if (i > 1) times.push_back(milliseconds * 1000 / calls);
    }
    std::sort(times.begin(), times.end());
    CHECK(cudaGraphExecDestroy(program));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFree(tables));
    return {times[times.size() / 2], sum};
  }

  // Bytes that a multiprocessor gets in a cycle while all of them copy.
  template <int kRows>
  float BytesPerCycle() {
    const CUtensorMap map = MapOf(pool_, {1, kProbePositions, kRows}, kRows, 1);
    constexpr int kBytes = kProbeStages * kProbeBytes;
    const auto kernel = CopyBoxes<kRows>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return kProbeTiles * float{kProbeBytes} / MedianCycles([&](int64_t* cycles) {
             kernel<<<device_.multiProcessorCount, kWarpSize, kBytes, stream_>>>(map, cycles);
           });
  }

  // The cycles of an instruction in a quarter of a multiprocessor, which has a tensor core and a
  // memory unit.
  template <Work kWork>
  float Cycles() {
    const int blocks = device_.multiProcessorCount;
    const float cycles = MedianCycles([&](int64_t* cycles) {
      Repeat<kWork><<<blocks, kWorkWarps * kWarpSize, kWorkWarps * 4096, stream_>>>(
          pool_, cycles, reinterpret_cast<float*>(pool_ + (1 << 20)));
    });
    return cycles / (kWorkTurns * 4 * kWorkWarps / (kWork == Work::kMma ? 4 : 1));
  }

 private:
  // The median of the thread blocks' cycles in the second of two launches.
  template <typename Launch>
  float MedianCycles(const Launch& launch) {
    std::vector<int64_t> cycles(device_.multiProcessorCount);
    int64_t* found;
    CHECK(cudaMalloc(&found, cycles.size() * sizeof(*found)));
    for (int i = 0; i < 2; ++i) {
      launch(found);
      CHECK(cudaGetLastError());
    }
    CHECK(cudaMemcpyAsync(cycles.data(), found, cycles.size() * sizeof(*found),
                          cudaMemcpyDeviceToHost, stream_));
    CHECK(cudaStreamSynchronize(stream_));
    CHECK(cudaFree(found));
    std::nth_element(cycles.begin(), cycles.begin() + cycles.size() / 2, cycles.end());
    return cycles[cycles.size() / 2];
  }

  // Dimensions: 128 bytes, positions of a page, columns of 128 bytes (K's, then V's), heads,
  // blocks.
  CUtensorMap MapOf(char* data, const Call& call, int box_rows, int box_columns) const {
    const auto position = static_cast<cuuint64_t>(2 * kKvHeads * kRowBytes);
    const auto columns = static_cast<cuuint32_t>(2 * kRowBytes / 128);
    const cuuint64_t sizes[] = {128, static_cast<cuuint64_t>(call.page), columns, kKvHeads,
                                static_cast<cuuint64_t>(call.Blocks())};
    const cuuint64_t strides[] = {position, 128, columns * 128, position * call.page};
    const cuuint32_t box[] = {128, static_cast<cuuint32_t>(box_rows),
                              static_cast<cuuint32_t>(box_columns), 1, 1};
    const cuuint32_t ones[] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult status =
        encode_(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, data, sizes, strides, box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
      std::fprintf(stderr, "cuTensorMapEncodeTiled: error %d\n", status);
      std::exit(1);
    }
    return map;
  }

  decltype(&cuTensorMapEncodeTiled) encode_;
  cudaDeviceProp device_;
  char* pool_;
  uint64_t* sum_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

std::pair<float, uint64_t> MeasureWay(Gpu& gpu, Way way, const Call& call) {
  switch (way) {
    case Way::kCpAsync:
      return gpu.Measure<Way::kCpAsync>(call);
    case Way::kBoxOfBoth:
      return gpu.Measure<Way::kBoxOfBoth>(call);
    case Way::kBoxOfEach:
      return gpu.Measure<Way::kBoxOfEach>(call);
    case Way::kRowOfEach:
      return gpu.Measure<Way::kRowOfEach>(call);
  }
  std::abort();
}

}  // namespace

// With --list it says what it measures, and needs no GPU.
int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--list") == 0) {
    std::printf("bytes a cycle: boxes\ncycles: mma.sync, ldmatrix.x4, cp.async, red.add\n");
    for (const Call& call : Calls()) {
      for (const Way way : kWays) {
        if (Serves(way, call)) std::printf("%s: %s\n", call.Name().c_str(), NameOf(way));
      }
    }
    return 0;
  }
  Gpu gpu;
  bool is_right = true;
  const char* before_call = "{";
  for (const Call& call : Calls()) {
    std::printf("%s\n \"%s\": ", before_call, call.Name().c_str());
    before_call = "},";
    const char* before_way = "{";
    uint64_t expected = 0;
    for (const Way way : kWays) {
      if (!Serves(way, call)) continue;
      const auto [microseconds, sum] = MeasureWay(gpu, way, call);
      if (way == kWays[0]) expected = sum;
      if (sum != expected) {
        std::fprintf(stderr, "%s: %s has copied other bytes\n", call.Name().c_str(), NameOf(way));
        is_right = false;
        continue;
      }
      std::printf("%s\"%s\": %.2f", before_way, NameOf(way), microseconds);
      before_way = ", ";
    }
    std::fflush(stdout);
  }
  std::printf(
      "},\n \"bytes a cycle\": {\"boxes of 2 KiB\": %.1f, \"boxes of 4 KiB\": %.1f, "
      "\"boxes of 8 KiB\": %.1f, \"boxes of 16 KiB\": %.1f",
      gpu.BytesPerCycle<16>(), gpu.BytesPerCycle<32>(), gpu.BytesPerCycle<64>(),
      gpu.BytesPerCycle<128>());
  std::printf(
      "},\n \"cycles\": {\"mma.sync\": %.2f, \"ldmatrix.x4\": %.2f, "
      "\"ldmatrix.x4 and cp.async\": %.2f, \"red.add of 16 bytes\": %.2f}\n}\n",
      gpu.Cycles<Work::kMma>(), gpu.Cycles<Work::kLoadMatrices>(), gpu.Cycles<Work::kLoadAndCopy>(),
      gpu.Cycles<Work::kAddInMemory>());
  return is_right ? 0 : 1;
}
