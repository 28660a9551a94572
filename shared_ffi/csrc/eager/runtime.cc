#include "eager/runtime.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <thread>

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
  std::deque<std::function<void()>> tasks_;
  size_t num_threads_ = 0;
};

// Never destroyed: its threads may outlive static destruction.
ThreadPool* pool = new ThreadPool;
bool is_forked_child = false;

// A forked child has none of its parent's threads. It gets a pool of its own and no OpenMP, which
// would wait for threads that it believes to have. Registered when the library loads: a parent that
// has made no call may have OpenMP's threads from torch's own operators.
[[maybe_unused]] const int fork_guard = pthread_atfork(nullptr, nullptr, [] {
  pool = new ThreadPool;
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

void RunOnThreads(int64_t num_threads, const std::function<void()>& work) {
  StartTeam* const start_team = is_forked_child ? nullptr : FindOpenMp();
  if (start_team != nullptr) {
    const auto call = [](void* work) {
      TellSanitizerOfReads(work);
      (*static_cast<const std::function<void()>*>(work))();
      TellSanitizerOfWrites(work);
    };
    void* const team = const_cast<std::function<void()>*>(&work);
    TellSanitizerOfWrites(team);
    start_team(call, team, static_cast<unsigned>(num_threads), /*flags=*/0);
    TellSanitizerOfReads(team);
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

// Attributes as scalars, sorted by name as the C API requires.
struct Attributes {
  explicit Attributes(std::vector<std::pair<std::string, Attribute>> from)
      : sorted(std::move(from)), scalars(sorted.size()), name_spans(sorted.size()) {
    std::sort(sorted.begin(), sorted.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < sorted.size(); ++i) {
      auto& [name, value] = sorted[i];
      name_spans[i] = {name.data(), name.size()};
      if (float* number = std::get_if<float>(&value)) {
        scalars[i] = {XLA_FFI_DataType_F32, number};
      } else {
        scalars[i] = {XLA_FFI_DataType_S64, &std::get<int64_t>(value)};
      }
      names.push_back(&name_spans[i]);
      pointers.push_back(&scalars[i]);
      types.push_back(XLA_FFI_AttrType_SCALAR);
    }
  }
  // Its vectors point to each other: a moved vector keeps its elements, a copied one does not.
  Attributes(Attributes&&) = default;

  std::vector<std::pair<std::string, Attribute>> sorted;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan> name_spans;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> pointers;
  std::vector<XLA_FFI_AttrType> types;
};

}  // namespace

std::optional<Executor> ExecutorOfEagerCall(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx) {
  if (api != Api()) return std::nullopt;
  return Executor{ctx->eager.num_threads, RunOnThreads};
}

struct PreparedCall::Parts {
  XLA_FFI_Handler* handler;
  std::vector<EagerBuffer> arrays;      // operands, then results
  std::vector<XLA_FFI_Buffer> buffers;  // of the arrays
  std::vector<XLA_FFI_ArgType> arg_types;
  std::vector<XLA_FFI_RetType> ret_types;
  Attributes attributes;
};

PreparedCall::PreparedCall(XLA_FFI_Handler* handler, std::vector<EagerBuffer> operands,
                           std::vector<EagerBuffer> results,
                           std::vector<std::pair<std::string, Attribute>> attributes)
    : parts_(new Parts{handler,
                       std::move(operands),
                       {},
                       {},
                       std::vector<XLA_FFI_RetType>(results.size(), XLA_FFI_RetType_BUFFER),
                       Attributes(std::move(attributes))}) {
  auto& arrays = parts_->arrays;
  parts_->arg_types.assign(arrays.size(), XLA_FFI_ArgType_BUFFER);
  std::move(results.begin(), results.end(), std::back_inserter(arrays));
  for (EagerBuffer& array : arrays) {
    parts_->buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, array.data,
                               static_cast<int64_t>(array.shape.size()), array.shape.data()});
  }
}

PreparedCall::~PreparedCall() = default;

size_t PreparedCall::num_operands() const { return parts_->arg_types.size(); }
size_t PreparedCall::num_results() const { return parts_->ret_types.size(); }

EagerStatus PreparedCall::Run(const EagerContext& context) const {
  std::vector<void*> addresses;
  for (const XLA_FFI_Buffer& buffer : parts_->buffers) addresses.push_back(buffer.data);
  return Run(addresses, context);
}

EagerStatus PreparedCall::Run(const std::vector<void*>& addresses,
                              const EagerContext& eager) const {
  Parts& parts = *parts_;  // the C API takes pointers to what it only reads
  std::vector<XLA_FFI_Buffer> buffers = parts.buffers;
  std::vector<void*> pointers(buffers.size());
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
  Attributes& attributes = parts.attributes;
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(attributes.sorted.size()),
                 attributes.types.data(),
                 attributes.names.data(),
                 attributes.pointers.data()};

  XLA_FFI_Error* error = parts.handler(&frame);
  if (error == nullptr) return {};
  EagerStatus status{error->code, error->message};
  delete error;
  return status;
}

}  // namespace xla_gpu
