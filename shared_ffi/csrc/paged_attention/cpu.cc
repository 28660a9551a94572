// Cuts attention into pieces that threads can take one after the other, for the kernel in
// cpu_kernel.cc. How that is done moves no bit of the result, so it may depend on anything.
#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <memory>

#include "cpu_instruction_sets.h"
#include "cpu_kernel.h"

namespace xla_gpu::paged_attention {

#define XLA_GPU_DECLARE(instruction_set) extern const CpuKernel kCpuKernel_##instruction_set;
XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_DECLARE)

namespace {

constexpr int64_t kRowsPerPiece = 256;   // that share a packed tile of K and V, at most
constexpr int64_t kTileBytes = 3 << 18;  // of K and V of a tile, at most, to stay in a core's cache
constexpr int64_t kJobsPerThread = 8;    // so that no thread waits long for the last
constexpr int64_t kMinJobCost = 1 << 22;       // so that neighbouring heads are read together
constexpr int64_t kMinParallelCost = 1 << 20;  // that is worth waking another thread for

#define XLA_GPU_ADDRESS(instruction_set) &kCpuKernel_##instruction_set,
constexpr const CpuKernel* kKernels[] = {XLA_GPU_FOR_CPU_INSTRUCTION_SETS(XLA_GPU_ADDRESS)};

const CpuKernel* BestKernel() {
  return *std::find_if(std::begin(kKernels), std::end(kKernels),
                       [](const CpuKernel* kernel) { return kernel->is_supported(); });
}

std::atomic<const CpuKernel*>& ChosenKernel() {
  static std::atomic<const CpuKernel*> kernel{BestKernel()};
  return kernel;
}

float* AllocateForThread(int64_t num_floats) {
  constexpr size_t kAlignment = 64;
  static thread_local std::unique_ptr<float, decltype(&std::free)> memory{nullptr, std::free};
  static thread_local int64_t capacity = 0;
  if (num_floats > capacity) {
    memory.reset();
    memory.reset(static_cast<float*>(std::aligned_alloc(kAlignment, num_floats * sizeof(float))));
    capacity = num_floats;
  }
  return memory.get();
}

// Rows that belong to no sequence: before the first sequence and after the last.
void ZeroPadding(const Params& p) {
  const int64_t row_bytes = p.num_heads * p.head_size * SizeOf(p.dtype);
  char* output = static_cast<char*>(p.output);
  const int64_t num_seqs = *p.num_seqs;
  const int64_t begin = num_seqs == 0 ? p.num_tokens : p.query_start_loc[0];
  const int64_t end = num_seqs == 0 ? p.num_tokens : p.query_start_loc[num_seqs];
  std::fill(output, output + begin * row_bytes, 0);
  std::fill(output + end * row_bytes, output + p.num_tokens * row_bytes, 0);
  if (p.lse == nullptr) return;
  constexpr float kNothing = -__builtin_inff();
  std::fill(p.lse, p.lse + begin * p.num_heads, kNothing);
  std::fill(p.lse + end * p.num_heads, p.lse + p.num_tokens * p.num_heads, kNothing);
}

// Multiply-adds of a piece, and as many again as reading the cache would take the time of.
int64_t CostOf(const Params& p, const Piece& piece) {
  const int64_t rows_per_head = piece.num_tokens * (p.num_heads / p.num_kv_heads) + 8;
  return 2 * p.head_size * (piece.end - piece.begin) * rows_per_head * piece.num_heads;
}

// Query tokens of one sequence each, as many as share a packed tile; of all kv heads.
std::vector<Piece> CutIntoRuns(const Params& p) {
  const int64_t tokens_per_run = std::max<int64_t>(1, kRowsPerPiece * p.num_kv_heads / p.num_heads);
  std::vector<Piece> runs;
  for (int64_t s = 0; s < *p.num_seqs; ++s) {
    const int64_t start = p.query_start_loc[s], end = p.query_start_loc[s + 1];
    for (int64_t token = start; token < end; token += tokens_per_run) {
      const int64_t num_tokens = std::min(tokens_per_run, end - token);
      const int64_t context_len = p.context_lens[s], position = context_len - (end - token);
      runs.push_back({s, token, num_tokens, position, 0, p.num_kv_heads, p.WindowBegin(position),
                      p.WindowEnd(position + num_tokens - 1, context_len), nullptr});
    }
  }
  return runs;
}

// A piece that several jobs share, each with some of its splits. The last of them merges.
struct SplitPiece {
  SplitPiece(const Piece& piece, int64_t num_jobs) : whole(piece), num_left(num_jobs) {}

  Piece whole;
  std::atomic<int64_t> num_left;
};

struct Job {
  Piece piece;
  SplitPiece* split_piece;  // null: the piece has all splits
};

// Runs cut by kv heads, so that their rows fit a thread's memory, and by splits, where threads
// would otherwise wait for the last of them: into jobs that cost about as much as is wanted.
class Jobs {
 public:
  Jobs(const Params& p, const std::vector<Piece>& runs, int64_t wanted_cost) : p_(p) {
    for (const Piece& run : runs) CutByHeads(run, std::max<int64_t>(1, wanted_cost));
    PlaceFindings();
    std::stable_sort(jobs_.begin(), jobs_.end(), [&](const Job& a, const Job& b) {
      return CostOf(p, a.piece) > CostOf(p, b.piece);
    });
  }

  int64_t Count() const { return static_cast<int64_t>(jobs_.size()); }

  void Do(int64_t i, const CpuKernel& kernel) {
    const Job& job = jobs_[i];
    kernel.attend(p_, job.piece, AllocateForThread);
    if (job.split_piece != nullptr && job.split_piece->num_left.fetch_sub(1) == 1) {
      kernel.merge(p_, job.split_piece->whole, AllocateForThread);
    }
  }

 private:
  // Neighbouring heads lie side by side in the cache: the more of them, the better it is read. So
  // of two ways to share a run, by splits and by heads, the first is taken if there are splits.
  void CutByHeads(const Piece& run, int64_t wanted_cost) {
    const int64_t cost_per_head = std::max<int64_t>(1, CostOf(p_, run) / run.num_heads);
    const int64_t rows_per_head = run.NumRows(p_) / run.num_heads;
    const int64_t bytes_per_head = 2 * kTile * p_.head_size * SizeOf(p_.cache_dtype);
    const int64_t that_fit =
        std::max<int64_t>(1, std::min(kRowsPerPiece / rows_per_head, kTileBytes / bytes_per_head));
    const int64_t at_once = run.NumSplits() > 1
                                ? that_fit
                                : std::clamp<int64_t>(wanted_cost / cost_per_head, 1, that_fit);
    for (int64_t head = 0; head < run.num_heads; head += at_once) {
      Piece piece = run;
      piece.first_head = head;
      piece.num_heads = std::min(at_once, run.num_heads - head);
      CutBySplits(piece, std::max<int64_t>(
                             1, wanted_cost * run.NumSplits() / (cost_per_head * piece.num_heads)));
    }
  }

  void CutBySplits(const Piece& whole, int64_t splits_at_once) {
    if (whole.NumSplits() <= splits_at_once) {
      jobs_.push_back({whole, nullptr});
      return;
    }
    split_pieces_.emplace_back(whole, DivideUp(whole.NumSplits(), splits_at_once));
    const int64_t step = splits_at_once * kSplit;
    for (int64_t first = whole.begin / kSplit * kSplit; first < whole.end; first += step) {
      Piece piece = whole;
      piece.begin = std::max(whole.begin, first);
      piece.end = std::min(whole.end, first + step);
      jobs_.push_back({piece, &split_pieces_.back()});
    }
  }

  void PlaceFindings() {
    int64_t num_floats = 0;
    for (const SplitPiece& x : split_pieces_) num_floats += NumFindings(x.whole);
    findings_.reset(new float[num_floats]);
    float* place = findings_.get();
    for (SplitPiece& x : split_pieces_) {
      x.whole.findings = place;
      place += NumFindings(x.whole);
    }
    for (Job& job : jobs_) {
      if (job.split_piece == nullptr) continue;
      const Piece& whole = job.split_piece->whole;
      const int64_t split = job.piece.begin / kSplit - whole.begin / kSplit;
      job.piece.findings = whole.findings + split * whole.NumRows(p_) * FindingSize(p_);
    }
  }

  int64_t NumFindings(const Piece& whole) const {
    return whole.NumSplits() * whole.NumRows(p_) * FindingSize(p_);
  }

  const Params& p_;
  std::vector<Job> jobs_;
  std::deque<SplitPiece> split_pieces_;  // which stay where they are
  std::unique_ptr<float[]> findings_;
};

}  // namespace

void RunOnCpu(const Params& p, const Executor& executor) {
  ZeroPadding(p);
  const std::vector<Piece> runs = CutIntoRuns(p);
  int64_t cost = 0;
  for (const Piece& run : runs) cost += CostOf(p, run);
  const int64_t num_threads =
      cost < kMinParallelCost ? 1 : std::max<int64_t>(1, executor.num_threads);
  const int64_t wanted_cost =
      std::max(cost / (kJobsPerThread * num_threads), std::min(kMinJobCost, cost / num_threads));
  Jobs jobs(p, runs, num_threads > 1 ? wanted_cost : cost);
  const CpuKernel& kernel = *ChosenKernel();
  ParallelFor({num_threads, executor.run}, jobs.Count(), [&](int64_t i) { jobs.Do(i, kernel); });
}

std::vector<std::string> CpuInstructionSets() {
  std::vector<std::string> names;
  for (const CpuKernel* kernel : kKernels) {
    if (kernel->is_supported()) names.push_back(kernel->instruction_set);
  }
  return names;
}

bool ChooseCpuInstructionSet(const std::string& name) {
  for (const CpuKernel* kernel : kKernels) {
    if (kernel->is_supported() && name == kernel->instruction_set) {
      ChosenKernel() = kernel;
      return true;
    }
  }
  return false;
}

std::string CpuInstructionSet() { return ChosenKernel().load()->instruction_set; }

}  // namespace xla_gpu::paged_attention
