// Why work could not be queued on a GPU. No CUDA headers: handlers include this.
#pragma once

namespace xla_gpu::gpu {

struct Error {
  const char* call = nullptr;  // the call of the CUDA runtime that failed; null: success
  const char* reason = nullptr;

  explicit operator bool() const { return call != nullptr; }
};

}  // namespace xla_gpu::gpu
