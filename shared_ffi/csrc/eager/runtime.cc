#include "eager/runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

// The C API declares these two types; the runtime defines them.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  xla_gpu::EagerContext eager;
};

namespace xla_gpu {
namespace {

// The entry point of GNU OpenMP: calls function(data) on each thread of a team, the calling thread
// included, and waits for all. These threads serve torch's own operators and spin for a while after
// each. Threads of our own would compete with them for the processors.
using StartTeam = void(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);

// The threads to use without OpenMP: at most one per processor, started on first need. They wait
// for tasks until the process ends.
class ThreadPool {
 public:
  void Schedule(std::function<void()> task, size_t wanted_threads) {
    const size_t limit = std::max(1u, std::thread::hardware_concurrency());
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    while (num_threads_ < std::min(wanted_threads, limit)) {
      std::thread([this] { Loop(); }).detach();
      ++num_threads_;
    }
    task_added_.notify_one();
  }

 private:
  void Loop() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        task_added_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable task_added_;
  std::list<std::function<void()>> tasks_;
  size_t num_threads_ = 0;
};

// Never destroyed: its threads may outlive static destruction.
alignas(ThreadPool) char memory_of_pool[sizeof(ThreadPool)];
ThreadPool* pool = new (memory_of_pool) ThreadPool;
bool is_forked_child = false;

// A forked child has none of its parent's threads. It gets a pool of its own and no OpenMP, which
// would wait for threads that it believes to have. Registered when the library loads: a parent that
// has made no call may have OpenMP's threads from torch's own operators. The new pool takes no
// memory: a failure could be reported to nobody.
[[maybe_unused]] const int fork_guard = pthread_atfork(nullptr, nullptr, [] {
  pool = new (memory_of_pool) ThreadPool;
  is_forked_child = true;
});

// Null where torch is not loaded, or made with another OpenMP.
StartTeam* FindOpenMp() {
  static auto* const found = reinterpret_cast<StartTeam*>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

// ThreadSanitizer does not see how OpenMP orders the threads of a team: its library is not
// instrumented. They see what was written before the team started, and its end sees what they
// wrote.
void TellSanitizerOfWrites([[maybe_unused]] void* team) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(team);
#endif
}
void TellSanitizerOfReads([[maybe_unused]] void* team) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(team);
#endif
}

using Clock = std::chrono::steady_clock;

// A team of OpenMP begins when its threads have left the team before, and ends when all have come.
// Beside other programs, a thread may get a processor only after the calling thread has done all
// the work; the calling thread spins meanwhile, for whole time slices. After such a loss, calls do
// without OpenMP for kPause times as long: at most one hundredth of the time is lost.
constexpr int kPause = 100;
constexpr Clock::duration kLoss = std::chrono::microseconds(100);  // less is usual
std::atomic<Clock::rep> without_open_mp_until{std::numeric_limits<Clock::rep>::min()};

bool OpenMpIsLate() {
  return Clock::now().time_since_epoch().count() <
         without_open_mp_until.load(std::memory_order_relaxed);
}

// Computes `work` on a team, and notes what time was lost with waiting for threads that did
// nothing.
void RunOnTeam(StartTeam* start_team, int64_t num_threads, const std::function<void()>& work) {
  struct Team {
    const std::function<void()>& work;
    const int64_t num_threads;
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<int64_t> num_came{0};
    Clock::time_point begin{}, end{};  // of the caller's work
    bool all_came = false;             // before that end

    void Work() {  // on each thread
      TellSanitizerOfReads(this);
      const bool is_caller = std::this_thread::get_id() == caller;
      if (is_caller) begin = Clock::now();
      num_came.fetch_add(1, std::memory_order_relaxed);
      work();
      if (is_caller) {
        all_came = num_came.load(std::memory_order_relaxed) == num_threads;
        end = Clock::now();
      }
      TellSanitizerOfWrites(this);
    }
  };
  Team team{work, num_threads};
  TellSanitizerOfWrites(&team);
  const Clock::time_point start = Clock::now();
  start_team([](void* team) { static_cast<Team*>(team)->Work(); }, &team,
             static_cast<unsigned>(num_threads), /*flags=*/0);
  TellSanitizerOfReads(&team);
  Clock::duration loss = team.begin - start;
  const Clock::time_point now = Clock::now();
  if (!team.all_came) loss += now - team.end;  // else they had items to finish
  static thread_local int64_t largest = 1;     // so far: a larger team waits for new threads
  if (loss < kLoss || num_threads > std::exchange(largest, std::max(largest, num_threads))) return;
  without_open_mp_until.store((now + kPause * loss).time_since_epoch().count(),
                              std::memory_order_relaxed);
}

void RunOnThreads(int64_t num_threads, const std::function<void()>& work) {
  StartTeam* const start_team = is_forked_child ? nullptr : FindOpenMp();
  if (start_team != nullptr && !OpenMpIsLate()) {
    RunOnTeam(start_team, num_threads, work);
    return;
  }
  for (int64_t i = 1; i < num_threads; ++i) pool->Schedule(work, num_threads - 1);
  work();
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->errc, args->message};
}

void GetErrorMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->eager.stream;
  return nullptr;
}

// Handlers ask this runtime for errors and for the stream. The rest of the table is null.
const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api table = {};
    table.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    table.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                         XLA_FFI_API_MINOR};
    table.XLA_FFI_Error_Create = CreateError;
    table.XLA_FFI_Error_GetMessage = GetErrorMessage;
    table.XLA_FFI_Error_Destroy = DestroyError;
    table.XLA_FFI_Stream_Get = GetStream;
    return table;
  }();
  return &api;
}

// Pages of their own, which are never given back.
class Pages : public std::pmr::memory_resource {
  void* do_allocate(size_t num_bytes, size_t) override {
    void* pages =
        mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return pages;
  }
  void do_deallocate(void* pages, size_t num_bytes, size_t) override { munmap(pages, num_bytes); }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

}  // namespace

std::optional<Executor> ExecutorOfEagerCall(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx) {
  if (api != Api()) return std::nullopt;
  return Executor{ctx->eager.num_threads, RunOnThreads};
}

std::pmr::memory_resource* LongLived() {
  // Never destroyed: threads may outlive static destruction.
  static auto* const pages = new std::pmr::monotonic_buffer_resource(1 << 18, new Pages);
  static auto* const pool = new std::pmr::synchronized_pool_resource(pages);
  return pool;
}

// Its vectors point to each other's elements.
struct EagerCall::Parts {
  explicit Parts(std::pmr::memory_resource* memory)
      : dimensions(memory),
        buffers(memory),
        arg_types(memory),
        ret_types(memory),
        attributes(memory),
        scalars(memory),
        name_spans(memory),
        names(memory),
        pointers(memory),
        types(memory) {}
  Parts(const Parts&) = delete;

  XLA_FFI_Handler* handler = nullptr;
  std::pmr::vector<int64_t> dimensions;      // of all buffers
  std::pmr::vector<XLA_FFI_Buffer> buffers;  // operands, then results
  std::pmr::vector<XLA_FFI_ArgType> arg_types;
  std::pmr::vector<XLA_FFI_RetType> ret_types;
  // Attributes as scalars, sorted by name as the C API requires.
  std::pmr::vector<std::pair<std::pmr::string, Attribute>> attributes;
  std::pmr::vector<XLA_FFI_Scalar> scalars;
  std::pmr::vector<XLA_FFI_ByteSpan> name_spans;
  std::pmr::vector<XLA_FFI_ByteSpan*> names;
  std::pmr::vector<void*> pointers;
  std::pmr::vector<XLA_FFI_AttrType> types;

  void SetBuffers(const std::vector<EagerBuffer>& operands,
                  const std::vector<EagerBuffer>& results) {
    size_t num_dimensions = 0;
    for (const auto* arrays : {&operands, &results}) {
      for (const EagerBuffer& array : *arrays) num_dimensions += array.shape.size();
    }
    dimensions.reserve(num_dimensions);  // they stay where they are
    buffers.reserve(operands.size() + results.size());
    for (const auto* arrays : {&operands, &results}) {
      for (const EagerBuffer& array : *arrays) {
        buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, array.data,
                           static_cast<int64_t>(array.shape.size()),
                           dimensions.data() + dimensions.size()});
        dimensions.insert(dimensions.end(), array.shape.begin(), array.shape.end());
      }
    }
    arg_types.assign(operands.size(), XLA_FFI_ArgType_BUFFER);
    ret_types.assign(results.size(), XLA_FFI_RetType_BUFFER);
  }

  void SetAttributes(std::vector<std::pair<std::string, Attribute>> given) {
    std::sort(given.begin(), given.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    const size_t count = given.size();
    attributes.reserve(count);
    scalars.resize(count);
    name_spans.resize(count);
    names.resize(count);
    pointers.resize(count);
    types.assign(count, XLA_FFI_AttrType_SCALAR);
    for (size_t i = 0; i < count; ++i) {
      auto& [name, value] = attributes.emplace_back(given[i].first, given[i].second);
      name_spans[i] = {name.data(), name.size()};
      names[i] = &name_spans[i];
      if (float* number = std::get_if<float>(&value)) {
        scalars[i] = {XLA_FFI_DataType_F32, number};
      } else {
        scalars[i] = {XLA_FFI_DataType_S64, &std::get<int64_t>(value)};
      }
      pointers[i] = &scalars[i];
    }
  }
};

EagerCall::EagerCall(XLA_FFI_Handler* handler, const std::vector<EagerBuffer>& operands,
                     const std::vector<EagerBuffer>& results,
                     std::vector<std::pair<std::string, Attribute>> attributes)
    : parts_(std::allocate_shared<Parts>(std::pmr::polymorphic_allocator<Parts>(LongLived()),
                                         LongLived())) {
  parts_->handler = handler;
  parts_->SetBuffers(operands, results);
  parts_->SetAttributes(std::move(attributes));
}

EagerCall::~EagerCall() = default;

size_t EagerCall::num_operands() const { return parts_->arg_types.size(); }
size_t EagerCall::num_results() const { return parts_->ret_types.size(); }

EagerStatus EagerCall::Run(const EagerContext& context) const {
  std::pmr::vector<void*> addresses;
  for (const XLA_FFI_Buffer& buffer : parts_->buffers) addresses.push_back(buffer.data);
  return Run(addresses, context);
}

EagerStatus EagerCall::Run(const std::pmr::vector<void*>& addresses,
                           const EagerContext& eager) const {
  Parts& parts = *parts_;  // the C API takes pointers to what it only reads
  const auto memory = addresses.get_allocator();
  std::pmr::vector<XLA_FFI_Buffer> buffers(parts.buffers, memory);
  std::pmr::vector<void*> pointers(buffers.size(), memory);
  for (size_t i = 0; i < buffers.size(); ++i) {
    buffers[i].data = addresses.at(i);
    pointers[i] = &buffers[i];
  }
  XLA_FFI_ExecutionContext context{eager};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(num_operands()),
                parts.arg_types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(num_results()),
                parts.ret_types.data(), pointers.data() + num_operands()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(parts.attributes.size()),
                 parts.types.data(),
                 parts.names.data(),
                 parts.pointers.data()};

  XLA_FFI_Error* error = parts.handler(&frame);
  if (error == nullptr) return {};
  EagerStatus status{error->code, std::move(error->message)};
  delete error;
  return status;
}

}  // namespace xla_gpu
