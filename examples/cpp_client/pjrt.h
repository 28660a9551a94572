// The part of PJRT's C API that a client needs, with errors as exceptions and handles that free
// themselves.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pjrt_c_api.h"

// The address of a library's symbol. The library is loaded if it was not, and never unloaded.
void* LoadSymbol(const char* library, const char* symbol);

// An array in host memory, row by row.
struct Array {
  std::string dtype;  // "float32", "bfloat16" or "int32"
  std::vector<int64_t> dims;
  std::string bytes;
};

// A PJRT plugin, such as xla_cuda_plugin.so of the package jax-cuda13-pjrt.
class Plugin {
 public:
  explicit Plugin(const char* path);

  // Registers a handler of XLA FFI. Must come before a program that calls it is compiled.
  void RegisterHandler(const std::string& platform, const std::string& target, void* handler) const;

  // Throws the message of an error, unless it is null.
  void Check(PJRT_Error* error) const;

  const PJRT_Api& api() const { return *api_; }
  int major_version() const { return api_->pjrt_api_version.major_version; }
  int minor_version() const { return api_->pjrt_api_version.minor_version; }

 private:
  std::string path_;
  const PJRT_Api* api_;
};

// An array in a device's memory.
class Buffer {
 public:
  Buffer(const Plugin& plugin, PJRT_Buffer* buffer);

  std::string ToHost() const;
  uintptr_t address() const;
  PJRT_Buffer* get() const { return buffer_.get(); }

 private:
  const Plugin* plugin_;
  std::shared_ptr<PJRT_Buffer> buffer_;
};

// A compiled program on one device.
class Executable {
 public:
  Executable(const Plugin& plugin, PJRT_LoadedExecutable* executable);

  // Runs it to its end. Arguments that the program donates are no longer valid.
  std::vector<Buffer> Run(const std::vector<Buffer>& arguments) const;

 private:
  const Plugin* plugin_;
  std::shared_ptr<PJRT_LoadedExecutable> executable_;
  size_t num_results_;
};

// The plugin's devices; the first one is used.
class Client {
 public:
  explicit Client(const Plugin& plugin);

  // `program` is StableHLO, `options` a CompileOptionsProto.
  Executable Compile(std::string program, const std::string& options) const;
  Buffer ToDevice(const Array& array) const;
  std::string platform() const;

 private:
  const Plugin* plugin_;
  std::shared_ptr<PJRT_Client> client_;
  PJRT_Device* device_;
};
