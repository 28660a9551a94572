// The memory of one work item, whose arrays are taken one after the other and given back all at
// once.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../../storage.h"

namespace xla_gpu::paged_attention {

class Arena {
 public:
  // The calling thread's arena, empty.
  static Arena* OfThread();

  // `count` elements at a multiple of 64 bytes, not initialized.
  template <typename T>
  XLA_GPU_INLINE T* Take(int64_t count) {
    return static_cast<T*>(TakeBytes(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  struct Chunk {
    std::unique_ptr<char, Free> memory;
    int64_t num_bytes;
  };

  void Reset();
  void* TakeBytes(int64_t num_bytes);

  std::vector<Chunk> chunks_;
  int64_t used_ = 0;  // bytes of the last chunk
};

}  // namespace xla_gpu::paged_attention
