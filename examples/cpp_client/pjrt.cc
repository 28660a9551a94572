#include "pjrt.h"

#include <dlfcn.h>

#include <map>
#include <stdexcept>

namespace {

// These two are those of XLA's pjrt_c_api_ffi_extension.h, which few packages have.
struct RegisterHandlerArgs {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  int traits;
};

struct FfiExtension {
  PJRT_Extension_Base base;
  void* register_type;
  void* add_user_data;
  PJRT_Error* (*register_handler)(RegisterHandlerArgs* args);
};

// Older versions have other arguments to register a handler.
constexpr int kOldestMinorVersion = 81;

// The arguments of a function of PJRT, all zero but for their size.
template <typename Args>
Args Sized() {
  Args args = {};
  args.struct_size = sizeof(Args);
  return args;
}

void Await(const Plugin& plugin, PJRT_Event* event) {
  auto await = Sized<PJRT_Event_Await_Args>();
  await.event = event;
  PJRT_Error* error = plugin.api().PJRT_Event_Await(&await);
  auto destroy = Sized<PJRT_Event_Destroy_Args>();
  destroy.event = event;
  plugin.Check(plugin.api().PJRT_Event_Destroy(&destroy));
  plugin.Check(error);
}

PJRT_Buffer_Type TypeOf(const std::string& dtype) {
  static const std::map<std::string, PJRT_Buffer_Type> types = {
      {"float32", PJRT_Buffer_Type_F32},
      {"bfloat16", PJRT_Buffer_Type_BF16},
      {"int32", PJRT_Buffer_Type_S32},
  };
  const auto found = types.find(dtype);
  if (found == types.end()) throw std::runtime_error("unknown dtype " + dtype);
  return found->second;
}

}  // namespace

void* LoadSymbol(const char* library, const char* symbol) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  void* address = handle == nullptr ? nullptr : dlsym(handle, symbol);
  if (address == nullptr) throw std::runtime_error(dlerror());
  return address;
}

Plugin::Plugin(const char* path) : path_(path) {
  api_ = reinterpret_cast<const PJRT_Api* (*)()>(LoadSymbol(path, "GetPjrtApi"))();
  if (major_version() != 0 || minor_version() < kOldestMinorVersion) {
    throw std::runtime_error(path_ + " speaks PJRT " + std::to_string(major_version()) + "." +
                             std::to_string(minor_version()) + "; it must be 0." +
                             std::to_string(kOldestMinorVersion) + " or a later 0");
  }
  auto initialize = Sized<PJRT_Plugin_Initialize_Args>();
  Check(api_->PJRT_Plugin_Initialize(&initialize));
}

void Plugin::RegisterHandler(const std::string& platform, const std::string& target,
                             void* handler) const {
  for (const auto* extension = api_->extension_start; extension; extension = extension->next) {
    if (extension->type != PJRT_Extension_Type_FFI) continue;
    auto args = Sized<RegisterHandlerArgs>();
    args.target_name = target.data();
    args.target_name_size = target.size();
    args.handler = handler;
    args.platform_name = platform.data();
    args.platform_name_size = platform.size();
    Check(reinterpret_cast<const FfiExtension*>(extension)->register_handler(&args));
    return;
  }
  throw std::runtime_error(path_ + " has no FFI extension: it takes no custom calls");
}

void Plugin::Check(PJRT_Error* error) const {
  if (error == nullptr) return;
  auto message = Sized<PJRT_Error_Message_Args>();
  message.error = error;
  api_->PJRT_Error_Message(&message);
  const std::string text(message.message, message.message_size);
  auto destroy = Sized<PJRT_Error_Destroy_Args>();
  destroy.error = error;
  api_->PJRT_Error_Destroy(&destroy);
  throw std::runtime_error(text);
}

Buffer::Buffer(const Plugin& plugin, PJRT_Buffer* buffer)
    : plugin_(&plugin), buffer_(buffer, [api = &plugin.api()](PJRT_Buffer* x) {
        auto args = Sized<PJRT_Buffer_Destroy_Args>();
        args.buffer = x;
        api->PJRT_Buffer_Destroy(&args);
      }) {}

std::string Buffer::ToHost() const {
  auto args = Sized<PJRT_Buffer_ToHostBuffer_Args>();
  args.src = get();
  plugin_->Check(plugin_->api().PJRT_Buffer_ToHostBuffer(&args));
  std::string bytes(args.dst_size, '\0');
  args.dst = bytes.data();
  plugin_->Check(plugin_->api().PJRT_Buffer_ToHostBuffer(&args));
  Await(*plugin_, args.event);
  return bytes;
}

uintptr_t Buffer::address() const {
  auto args = Sized<PJRT_Buffer_UnsafePointer_Args>();
  args.buffer = get();
  plugin_->Check(plugin_->api().PJRT_Buffer_UnsafePointer(&args));
  return args.buffer_pointer;
}

Executable::Executable(const Plugin& plugin, PJRT_LoadedExecutable* executable)
    : plugin_(&plugin), executable_(executable, [api = &plugin.api()](PJRT_LoadedExecutable* x) {
        auto args = Sized<PJRT_LoadedExecutable_Destroy_Args>();
        args.executable = x;
        api->PJRT_LoadedExecutable_Destroy(&args);
      }) {
  auto get = Sized<PJRT_LoadedExecutable_GetExecutable_Args>();
  get.loaded_executable = executable;
  plugin.Check(plugin.api().PJRT_LoadedExecutable_GetExecutable(&get));
  auto count = Sized<PJRT_Executable_NumOutputs_Args>();
  count.executable = get.executable;
  plugin.Check(plugin.api().PJRT_Executable_NumOutputs(&count));
  num_results_ = count.num_outputs;
  auto destroy = Sized<PJRT_Executable_Destroy_Args>();
  destroy.executable = get.executable;
  plugin.Check(plugin.api().PJRT_Executable_Destroy(&destroy));
}

std::vector<Buffer> Executable::Run(const std::vector<Buffer>& arguments) const {
  std::vector<PJRT_Buffer*> inputs;
  for (const Buffer& argument : arguments) inputs.push_back(argument.get());
  std::vector<PJRT_Buffer*> outputs(num_results_);
  PJRT_Buffer* const* inputs_of_device[] = {inputs.data()};
  PJRT_Buffer** outputs_of_device[] = {outputs.data()};
  PJRT_Event* done = nullptr;
  auto options = Sized<PJRT_ExecuteOptions>();
  auto args = Sized<PJRT_LoadedExecutable_Execute_Args>();
  args.executable = executable_.get();
  args.options = &options;
  args.argument_lists = inputs_of_device;
  args.num_devices = 1;
  args.num_args = inputs.size();
  args.output_lists = outputs_of_device;
  args.device_complete_events = &done;
  plugin_->Check(plugin_->api().PJRT_LoadedExecutable_Execute(&args));
  std::vector<Buffer> results;
  for (PJRT_Buffer* output : outputs) results.emplace_back(*plugin_, output);
  Await(*plugin_, done);
  return results;
}

Client::Client(const Plugin& plugin) : plugin_(&plugin) {
  auto create = Sized<PJRT_Client_Create_Args>();
  plugin.Check(plugin.api().PJRT_Client_Create(&create));
  client_ = {create.client, [api = &plugin.api()](PJRT_Client* x) {
               auto args = Sized<PJRT_Client_Destroy_Args>();
               args.client = x;
               api->PJRT_Client_Destroy(&args);
             }};
  auto devices = Sized<PJRT_Client_AddressableDevices_Args>();
  devices.client = client_.get();
  plugin.Check(plugin.api().PJRT_Client_AddressableDevices(&devices));
  if (devices.num_addressable_devices == 0) throw std::runtime_error("the plugin has no device");
  device_ = devices.addressable_devices[0];
}

Executable Client::Compile(std::string program, const std::string& options) const {
  constexpr char kFormat[] = "mlir";
  auto code = Sized<PJRT_Program>();
  code.code = program.data();
  code.code_size = program.size();
  code.format = kFormat;
  code.format_size = sizeof(kFormat) - 1;
  auto args = Sized<PJRT_Client_Compile_Args>();
  args.client = client_.get();
  args.program = &code;
  args.compile_options = options.data();
  args.compile_options_size = options.size();
  plugin_->Check(plugin_->api().PJRT_Client_Compile(&args));
  return {*plugin_, args.executable};
}

Buffer Client::ToDevice(const Array& array) const {
  auto args = Sized<PJRT_Client_BufferFromHostBuffer_Args>();
  args.client = client_.get();
  args.data = array.bytes.data();
  args.type = TypeOf(array.dtype);
  args.dims = array.dims.data();
  args.num_dims = array.dims.size();
  args.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  args.device = device_;
  plugin_->Check(plugin_->api().PJRT_Client_BufferFromHostBuffer(&args));
  Await(*plugin_, args.done_with_host_buffer);
  return {*plugin_, args.buffer};
}

std::string Client::platform() const {
  auto args = Sized<PJRT_Client_PlatformName_Args>();
  args.client = client_.get();
  plugin_->Check(plugin_->api().PJRT_Client_PlatformName(&args));
  return {args.platform_name, args.platform_name_size};
}
