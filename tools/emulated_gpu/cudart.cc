// Stands in for the static CUDA runtime: the functions that the library calls, and those by which a
// test captures the library's launches in a graph. A device's memory is the host's. Environment
// variables describe the GPU:
//   EMULATED_GPU_SEED: the order of warps and copies, and the number of multiprocessors.
//   EMULATED_GPU_CAPABILITY: 90 for 9.0.
//   EMULATED_GPU_FAIL: a call that fails, as CALL, or as CALL=ERROR with the error's number.
//   EMULATED_GPU_LAUNCHES: a file that gets of each launch the blocks, the threads of a block, and
//     whether it begins early.
//   EMULATED_GPU_EARLY: 0 if no kernel begins before the one before it has ended.
//   EMULATED_GPU_RACES: 0 if thread blocks may read what others write.
//   EMULATED_GPU_COUNTS: a file that gets the counts of each launch, as a line of JSON.
//   EMULATED_GPU_FAULT: see PlantFault.
// The variable number_change (machine.h) is a number that changes while a kernel reads it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <utility>

#include "machine.h"

// In a build with mutants (tools/mutants): the one in effect.
extern __attribute__((weak, visibility("default"))) int mutant_in_effect;

namespace {

using Error = int;
constexpr Error kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoKernelImage = 209,
                kInvalidHandle = 400, kIllegalState = 401, kSymbolNotFound = 500,
                kLaunchFailure = 719, kNotSupported = 801, kCaptureUnsupported = 900,
                kCaptureInvalidated = 901, kCaptureImplicit = 906, kUnknown = 999;

struct Dim3 {
  unsigned x, y, z;
};
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char pad[64];
    int allowed;
  } value;
};
struct LaunchConfig {
  Dim3 grid, block;
  size_t shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
constexpr int kProgrammaticStreamSerialization = 6;

// The texts in PTX of a unit that was compiled for several targets.
struct Image {
  const char* text;
  size_t size;
  unsigned target;
};
struct Unit {
  std::vector<Image> images;
  std::map<std::string, std::shared_ptr<emulated_gpu::Kernel>> kernels;  // those that were launched
};
struct Function {
  Unit* unit;
  std::string name;
};

// A launch with a copy of its arguments.
struct Work {
  std::shared_ptr<emulated_gpu::Kernel> kernel;
  emulated_gpu::Launch launch;
};
using Graph = std::vector<Work>;

// A stream that waits for the legacy default stream, as those of cudaStreamCreate do.
struct Stream {
  enum Status { kNone, kActive, kInvalidated } status = kNone;  // of its capture
  Graph graph;
};

std::recursive_mutex mutex;
std::string failure;
std::map<void*, Stream>& Streams() {
  static std::map<void*, Stream> streams;
  return streams;
}
std::map<const void*, Function>& Functions() {
  static std::map<const void*, Function> functions;
  return functions;
}

int Number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

int Seed() { return Number("EMULATED_GPU_SEED", 0); }

using emulated_gpu::Capability;
using emulated_gpu::OutcomeOf;

// What a thread block can have.
int SharedBytes(int capability) {
  return 1024 * (capability == 80 ? 163 : capability == 90 || capability / 10 == 10 ? 227 : 99);
}

// EMULATED_GPU_FAULT="DecodeAttention 3": removes the fourth barrier, wait or fence from the
// kernels with this name.
void PlantFault(emulated_gpu::Kernel* kernel) {
  const char* fault = std::getenv("EMULATED_GPU_FAULT");
  int number = std::atoi(fault + std::strcspn(fault, " "));
  for (emulated_gpu::Instruction& instruction : kernel->code) {
    emulated_gpu::Instruction removed = instruction;
    if (!emulated_gpu::RemoveWait(&removed) || number-- > 0) continue;
    std::fprintf(stderr, "emulated GPU: removed %s in line %d\n", removed.opcode.c_str(),
                 removed.line);
    instruction = std::move(removed);
    return;
  }
  throw std::runtime_error("the kernel has no such wait");
}

// Reads the PTX for the device: the newest that is not too new. `a` of sm_90a is not in the number.
std::shared_ptr<emulated_gpu::Kernel> Find(const void* handle) {
  const auto found = Functions().find(handle);
  if (found == Functions().end()) return nullptr;
  Unit& unit = *found->second.unit;
  const char* fault = std::getenv("EMULATED_GPU_FAULT");
  const bool is_faulty =
      fault != nullptr &&
      found->second.name.find(fault, 0, std::strcspn(fault, " ")) != std::string::npos;
  const unsigned device = static_cast<unsigned>(Capability());
  const Image* best = nullptr;
  for (const Image& image : unit.images) {
    if (image.target <= device && (best == nullptr || image.target > best->target)) best = &image;
  }
  if (best == nullptr) return nullptr;
  std::shared_ptr<emulated_gpu::Kernel>& kernel =
      unit.kernels[found->second.name + (is_faulty ? fault : "") + std::to_string(best->target)];
  if (kernel != nullptr) return kernel;
  kernel = emulated_gpu::Parse(std::string(best->text, strnlen(best->text, best->size)),
                               found->second.name);
  if (kernel != nullptr && is_faulty) PlantFault(kernel.get());
  return kernel;
}

template <typename T>
T At(const char* place) {
  T value;
  std::memcpy(&value, place, sizeof(value));
  return value;
}

Error MakeWork(std::shared_ptr<emulated_gpu::Kernel> kernel, const LaunchConfig& config,
               void** arguments, bool begins_early, Work* work) {
  emulated_gpu::Launch& launch = work->launch;
  launch = {kernel.get(),
            {config.grid.x, config.grid.y, config.grid.z},
            {config.block.x, config.block.y, config.block.z},
            static_cast<int>(config.shared_bytes),
            begins_early,
            std::vector<char>(static_cast<size_t>(kernel->parameter_bytes))};
  for (size_t k = 0; k < kernel->parameter_sizes.size(); ++k) {
    std::memcpy(launch.parameters.data() + kernel->parameter_offsets[k], arguments[k],
                static_cast<size_t>(kernel->parameter_sizes[k]));
  }
  const unsigned threads = config.block.x * config.block.y * config.block.z;
  if (threads > 1024 ||
      (kernel->max_threads > 0 && threads > static_cast<unsigned>(kernel->max_threads))) {
    failure = "more threads than the kernel was compiled for";
    return kLaunchFailure;
  }
  if (kernel->shared_bytes + launch.shared_bytes > SharedBytes(Capability())) {
    failure = "more shared memory than a thread block can have";
    return kLaunchFailure;
  }
  work->kernel = std::move(kernel);
  return kSuccess;
}

Error Run(Work work) {
  emulated_gpu::Launch& launch = work.launch;
  if (&mutant_in_effect != nullptr) launch.environment = static_cast<uint32_t>(mutant_in_effect);
  launch.has_change =
      emulated_gpu::number_change.kernel != nullptr &&
      work.kernel->name.find(emulated_gpu::number_change.kernel) != std::string::npos;
  if (const char* log = std::getenv("EMULATED_GPU_LAUNCHES")) {
    std::ofstream(log, std::ios::app)
        << launch.grid[0] << ' ' << launch.threads[0] << ' ' << launch.begins_early << '\n';
  }
  try {
    emulated_gpu::RunKernel(launch, static_cast<unsigned>(Seed()));
  } catch (const std::exception& error) {
    failure = error.what();
    return kLaunchFailure;
  }
  return kSuccess;
}

// What may be done in a stream. A stream that is capturing gets `capturing`, which is null
// otherwise. The legacy default stream may do nothing meanwhile: it would wait for that stream, as
// that stream for it. An operation that may not be done ends all captures it has to do with.
Error Enter(void* handle, Stream** capturing) {
  *capturing = nullptr;
  if (handle != nullptr) {
    const auto found = Streams().find(handle);
    if (found == Streams().end()) return kInvalidHandle;
    if (found->second.status == Stream::kInvalidated) return kCaptureInvalidated;
    if (found->second.status == Stream::kActive) *capturing = &found->second;
    return kSuccess;
  }
  Error outcome = kSuccess;
  for (auto& [_, stream] : Streams()) {
    if (stream.status == Stream::kNone) continue;
    stream.status = Stream::kInvalidated;
    outcome = kCaptureImplicit;
  }
  return outcome;
}

}  // namespace

int emulated_gpu::Capability() { return Number("EMULATED_GPU_CAPABILITY", 90); }

int emulated_gpu::OutcomeOf(const char* call) {
  const char* failing = std::getenv("EMULATED_GPU_FAIL");
  const size_t size = std::strlen(call);
  if (failing == nullptr || std::strncmp(failing, call, size) != 0) return kSuccess;
  if (failing[size] == '=') return std::atoi(failing + size + 1);
  return failing[size] == 0 ? kUnknown : kSuccess;
}

extern "C" {

// The fat binary: a header, and an image for each target. Images of machine code are not used.
void** __cudaRegisterFatBinary(void* wrapper) {
  const char* data = At<const char*>(static_cast<const char*>(wrapper) + 8);
  Unit* unit = new Unit;
  const char* at = data + At<uint16_t>(data + 6);
  const char* end = at + At<uint64_t>(data + 8);
  while (at < end) {
    const uint32_t header = At<uint32_t>(at + 4);
    const uint64_t size = At<uint64_t>(at + 8);
    const bool is_ptx = At<uint16_t>(at) == 1, is_compressed = At<uint32_t>(at + 16) != 0;
    if (is_ptx && is_compressed)
      std::fprintf(stderr, "emulated GPU: compressed PTX; compile with --compress-mode=none\n");
    if (is_ptx && !is_compressed)
      unit->images.push_back({at + header, size, At<uint32_t>(at + 28)});
    at += header + size;
  }
  return reinterpret_cast<void**>(unit);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** unit, const char* host_function, char*, const char* name, int,
                            void*, void*, void*, void*, int*) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  Functions()[host_function] = {reinterpret_cast<Unit*>(unit), name};
}

Error cudaGetDevice(int* device) {
  *device = Seed() * 1000 + Capability();
  return OutcomeOf("cudaGetDevice");
}

Error cudaDeviceGetAttribute(int* value, int attribute, int device) {
  constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedBytes = 97;
  constexpr int kCounts[] = {1, 2, 3, 4, 5, 8, 132};
  const int capability = device % 1000;
  *value = attribute == kMultiprocessors ? kCounts[device / 1000 % 7]
           : attribute == kMajor         ? capability / 10
           : attribute == kMinor         ? capability % 10
           : attribute == kSharedBytes   ? SharedBytes(capability)
                                         : 0;
  return OutcomeOf("cudaDeviceGetAttribute");
}

Error cudaFuncSetAttribute(const void*, int, int) { return OutcomeOf("cudaFuncSetAttribute"); }

Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num_blocks, const void*, int,
                                                             size_t, unsigned) {
  *num_blocks = 1;
  return OutcomeOf("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void* function,
                                                    int threads, size_t bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks, function, threads,
                                                                bytes, 0);
}

Error cudaLaunchKernelExC(const LaunchConfig* config, const void* function, void** arguments) {
  if (const Error outcome = OutcomeOf("cudaLaunchKernelEx")) return outcome;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* capturing = nullptr;
  if (const Error outcome = Enter(config->stream, &capturing)) return outcome;
  bool begins_early = false;
  for (unsigned k = 0; k < config->num_attributes; ++k) {
    const LaunchAttribute& attribute = config->attributes[k];
    begins_early |= attribute.id == kProgrammaticStreamSerialization && attribute.value.allowed &&
                    Number("EMULATED_GPU_EARLY", 1) != 0;
  }
  std::shared_ptr<emulated_gpu::Kernel> kernel;
  try {
    kernel = Find(function);
  } catch (const std::exception& error) {
    failure = error.what();
    return kLaunchFailure;
  }
  if (kernel == nullptr) return kNoKernelImage;
  Work work;
  if (const Error outcome = MakeWork(std::move(kernel), *config, arguments, begins_early, &work)) {
    return outcome;
  }
  if (capturing == nullptr) return Run(std::move(work));
  capturing->graph.push_back(std::move(work));
  return kSuccess;
}

// The driver's functions: those that the library calls. `found`: 0, or 1 if there is none of that
// name, or 2 if the version has none.
Error cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                       unsigned long long, int* found) {
  if (const Error outcome = OutcomeOf("cudaGetDriverEntryPoint")) return outcome;
  const bool is_known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  const int status = !is_known ? 1 : version < 12000 ? 2 : 0;
  *function = status == 0 ? reinterpret_cast<void*>(&emulated_gpu::PtxEncodeTiled) : nullptr;
  if (found != nullptr) *found = status;
  return status == 0 || found != nullptr ? kSuccess : kSymbolNotFound;
}
Error cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                              int* found) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 13000, flags, found);
}

// Streams and graphs, for tests, which call them in the library that has the kernels. The work of a
// stream has ended when its call returns. Protected: PyTorch's CUDA runtime has these names, too.
#pragma GCC visibility push(protected)
Error cudaStreamCreate(void** stream) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  *stream = new char;  // nothing but an address that no other stream has
  Streams()[*stream] = {};
  return kSuccess;
}
Error cudaStreamDestroy(void* stream) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (Streams().erase(stream) == 0) return kInvalidHandle;
  delete static_cast<char*>(stream);
  return kSuccess;
}

Error cudaStreamSynchronize(void* handle) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* capturing = nullptr;
  if (const Error outcome = Enter(handle, &capturing)) return outcome;
  if (capturing == nullptr) return kSuccess;
  capturing->status = Stream::kInvalidated;
  return kCaptureUnsupported;
}

// The mode says which calls of other kinds are forbidden, such as allocations. There are none here.
Error cudaStreamBeginCapture(void* handle, int) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (handle == nullptr) return kCaptureUnsupported;
  const auto found = Streams().find(handle);
  if (found == Streams().end()) return kInvalidHandle;
  if (found->second.status != Stream::kNone) return kIllegalState;
  found->second.status = Stream::kActive;
  return kSuccess;
}
Error cudaStreamIsCapturing(void* handle, int* status) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  *status = Stream::kNone;
  if (handle == nullptr) {
    for (const auto& [_, stream] : Streams()) {
      if (stream.status != Stream::kNone) return kCaptureImplicit;
    }
    return kSuccess;
  }
  const auto found = Streams().find(handle);
  if (found == Streams().end()) return kInvalidHandle;
  *status = found->second.status;
  return kSuccess;
}
Error cudaStreamEndCapture(void* handle, void** graph) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  *graph = nullptr;
  const auto found = Streams().find(handle);
  if (found == Streams().end()) return kInvalidHandle;
  if (found->second.status == Stream::kNone) return kIllegalState;
  const Stream ended = std::exchange(found->second, {});
  if (ended.status == Stream::kInvalidated) return kCaptureInvalidated;
  *graph = new Graph(ended.graph);
  return kSuccess;
}

Error cudaGraphInstantiate(void** executable, void* graph, unsigned long long) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  return kSuccess;
}
Error cudaGraphLaunch(void* executable, void* handle) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream* capturing = nullptr;
  if (const Error outcome = Enter(handle, &capturing)) return outcome;
  if (capturing != nullptr) return kNotSupported;  // a GPU makes it a part of the graph
  for (const Work& work : *static_cast<Graph*>(executable)) {
    if (const Error outcome = Run(work)) return outcome;
  }
  return kSuccess;
}
Error cudaGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return kSuccess;
}
Error cudaGraphExecDestroy(void* executable) { return cudaGraphDestroy(executable); }

const char* cudaGetErrorString(Error error) {
  switch (error) {
    case kLaunchFailure:
      return failure.c_str();
    case kInvalidValue:
      return "invalid argument";
    case kCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case kCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case kCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    default:
      return "unknown error";
  }
}
#pragma GCC visibility pop

// kernel<<<...>>>(...): nvcc's code for the call pushes the sizes, and its stub for the kernel pops
// them and launches. An error is that of the last such launch.
thread_local LaunchConfig pushed;
thread_local Error last_error = kSuccess;

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, void* stream) {
  pushed = {grid, block, shared_bytes, stream, nullptr, 0};
  return 0;
}
Error __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<void**>(stream) = pushed.stream;
  return kSuccess;
}
Error cudaLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** arguments,
                       size_t shared_bytes, void* stream) {
  const LaunchConfig config{grid, block, shared_bytes, stream, nullptr, 0};
  return last_error = cudaLaunchKernelExC(&config, function, arguments);
}
Error __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return kSuccess;
}
Error __cudaLaunchKernel(void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared_bytes,
                         void* stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
char __cudaInitModule(void**) { return 1; }

Error cudaGetLastError() { return std::exchange(last_error, kSuccess); }
Error cudaDeviceSynchronize() { return kSuccess; }

Error cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *memory == nullptr ? kOutOfMemory : kSuccess;
}
Error cudaFree(void* memory) {
  std::free(memory);
  return kSuccess;
}
Error cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  std::memcpy(to, from, bytes);
  return kSuccess;
}
Error cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return kSuccess;
}

// A kernel from a text in PTX. Returns null, or what is wrong until the next call.
__attribute__((visibility("default"))) const char* PtxRun(const char* text, const char* name,
                                                          const unsigned* grid, unsigned threads,
                                                          size_t shared_bytes, void** arguments) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  static std::map<std::pair<std::string, std::string>, std::shared_ptr<emulated_gpu::Kernel>>
      parsed;
  try {
    std::shared_ptr<emulated_gpu::Kernel>& kernel = parsed[{text, name}];
    if (kernel == nullptr) kernel = emulated_gpu::Parse(text, name);
    if (kernel == nullptr) throw std::runtime_error("there is no such kernel");
    const LaunchConfig config{
        {grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared_bytes, nullptr, nullptr, 0};
    Work work;
    Error outcome = MakeWork(kernel, config, arguments, false, &work);
    if (outcome == kSuccess) outcome = Run(std::move(work));
    return outcome == kSuccess ? nullptr : failure.c_str();
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}

}  // extern "C"
