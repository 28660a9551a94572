#include "../handler.h"

#include "cpu.h"
#include "cuda.h"
#include "params.h"

namespace xla_gpu::kv_cache_update {
namespace {

constexpr char kOp[] = "kv_cache_update";

ffi::Error MakeParams(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                      ffi::AnyBuffer slot_mapping, ffi::AnyBuffer updated, Params* params) {
  DType dtype;
  if (!HasShape(key, {kAnySize, kAnySize, kAnySize})) {
    return InvalidArgument(kOp, "key must have shape [num_tokens, num_kv_heads, head_size]; got ",
                           ShapeName(key.dimensions()));
  }
  const int64_t num_tokens = key.dimensions()[0];
  const int64_t num_kv_heads = key.dimensions()[1];
  const int64_t head_size = key.dimensions()[2];
  if (!StorageType(key.element_type(), &dtype)) {
    return InvalidArgument(kOp, "key must have dtype float32, float16 or bfloat16; got ",
                           DTypeName(key.element_type()));
  }
  if (!HasShape(value, {num_tokens, num_kv_heads, head_size})) {
    return InvalidArgument(kOp, "value must have shape [num_tokens=", num_tokens,
                           ", num_kv_heads=", num_kv_heads, ", head_size=", head_size, "]; got ",
                           ShapeName(value.dimensions()));
  }
  if (value.element_type() != key.element_type()) {
    return InvalidArgument(kOp, "value must have key's dtype ", DTypeName(key.element_type()),
                           "; got ", DTypeName(value.element_type()));
  }
  if (!HasShape(kv_cache, {kAnySize, kAnySize, 2 * num_kv_heads, head_size}) ||
      kv_cache.dimensions()[1] < 1) {
    return InvalidArgument(kOp, "kv_cache must have shape [num_blocks, block_size, ",
                           "2 * num_kv_heads=", 2 * num_kv_heads, ", head_size=", head_size,
                           "]; got ", ShapeName(kv_cache.dimensions()));
  }
  if (kv_cache.element_type() != key.element_type()) {
    return InvalidArgument(kOp, "kv_cache must have key's dtype ", DTypeName(key.element_type()),
                           "; got ", DTypeName(kv_cache.element_type()));
  }
  if (!HasShape(slot_mapping, {num_tokens})) {
    return InvalidArgument(kOp, "slot_mapping must have shape [num_tokens=", num_tokens, "]; got ",
                           ShapeName(slot_mapping.dimensions()));
  }
  if (slot_mapping.element_type() != ffi::S32 && slot_mapping.element_type() != ffi::S64) {
    return InvalidArgument(kOp, "slot_mapping must have dtype int32 or int64; got ",
                           DTypeName(slot_mapping.element_type()));
  }
  if (updated.untyped_data() != kv_cache.untyped_data()) {
    return InvalidArgument(kOp, "the result must alias kv_cache (output_to_operand_aliasing); ",
                           "got a buffer of its own");
  }
  *params = {kv_cache.untyped_data(),
             key.untyped_data(),
             value.untyped_data(),
             slot_mapping.untyped_data(),
             slot_mapping.element_type() == ffi::S64,
             kv_cache.dimensions()[0] * kv_cache.dimensions()[1],
             num_tokens,
             num_kv_heads,
             head_size,
             dtype};
  return ffi::Error::Success();
}

// Before anything is written, so that an error leaves the cache as it was.
ffi::Error CheckSlots(const Params& p) {
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    if (p.Slot(token) >= p.num_slots) {
      return InvalidArgument(kOp, "slot_mapping[", token,
                             "] must be below num_blocks * block_size=", p.num_slots,
                             " (negative for padding); got ", p.Slot(token));
    }
  }
  return ffi::Error::Success();
}

ffi::Error OnCpu(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                 ffi::AnyBuffer slot_mapping, ffi::Result<ffi::AnyBuffer> updated,
                 const Executor& executor) {
  Params params;
  ffi::Error error = MakeParams(kv_cache, key, value, slot_mapping, *updated, &params);
  if (error.success()) error = CheckSlots(params);
  if (error.success()) RunOnCpu(params, executor);
  return error;
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                  ffi::AnyBuffer slot_mapping, ffi::Result<ffi::AnyBuffer> updated, void* stream) {
  Params params;
  ffi::Error error = MakeParams(kv_cache, key, value, slot_mapping, *updated, &params);
  if (error.success()) error = Launched(kOp, RunOnCuda(params, stream));
  return error;
}
#endif

// What a call has on every platform.
auto Bind() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()   // kv_cache
      .Arg<ffi::AnyBuffer>()   // key
      .Arg<ffi::AnyBuffer>()   // value
      .Arg<ffi::AnyBuffer>()   // slot_mapping
      .Ret<ffi::AnyBuffer>();  // the kv_cache, updated in place
}

}  // namespace
}  // namespace xla_gpu::kv_cache_update

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvCacheUpdateCpu, xla_gpu::kv_cache_update::OnCpu,
                              xla_gpu::kv_cache_update::Bind().Ctx<xla_gpu::Executor>());

#ifdef XLA_GPU_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    KvCacheUpdateCuda, xla_gpu::kv_cache_update::OnCuda,
    xla_gpu::kv_cache_update::Bind().Ctx<xla::ffi::PlatformStream<void*>>(),
    {xla::ffi::Traits::kCmdBufferCompatible});
#endif
