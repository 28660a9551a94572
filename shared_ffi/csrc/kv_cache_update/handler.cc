#include "../kv_cache_operand.h"
#include "cpu.h"
#include "cuda.h"
#include "params.h"

namespace xla_gpu::kv_cache_update {
namespace {

constexpr char kOp[] = "kv_cache_update";

constexpr size_t kNumOperands = 4;

ffi::Error MakeParams(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                      ffi::AnyBuffer slot_mapping, ffi::RemainingArgs other_operands,
                      ffi::AnyBuffer updated, ffi::RemainingRets other_results,
                      const ffi::Dictionary& attributes, Params* params) {
  AttributeReader reader(kOp, attributes);
  KvLayout layout = KvLayout::Read(&reader);
  FeatureOperands features(kOp, kNumOperands, other_operands, &reader,
                           {"value_cache", "k_scale", "v_scale"});
  ffi::Error error = reader.Finish();
  std::optional<ffi::AnyBuffer> value_cache;
  if (error.success()) error = features.Find("value_cache", &value_cache);
  if (error.success()) error = features.Finish();
  if (error.failure()) return error;
  DType dtype;
  if (!HasShape(key, {kAnySize, kAnySize, kAnySize})) {
    return InvalidArgument(kOp, "key must have shape [num_tokens, num_kv_heads, head_size]; got ",
                           ShapeName(key.dimensions()));
  }
  const int64_t num_tokens = key.dimensions()[0];
  const int64_t num_kv_heads = key.dimensions()[1];
  const int64_t head_size = key.dimensions()[2];
  if (!StorageType(key.element_type(), &dtype) &&
      !(key.element_type() == kv_cache.element_type() &&
        StorageTypeOf8Bits(key.element_type(), &dtype))) {
    return InvalidArgument(kOp, "key must have dtype float32, float16 or bfloat16, or one of 8 ",
                           "bits that kv_cache has, too; got ", DTypeName(key.element_type()));
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
  KvCache cache;
  error = ReadKvCache(kOp, kv_cache, value_cache, num_kv_heads, head_size, &layout, &cache);
  DType cache_dtype;
  if (error.success()) {
    error =
        ReadCacheDType(kOp, kv_cache, value_cache, "key", key.element_type(), dtype, &cache_dtype);
  }
  KvScales k_scale, v_scale;
  const auto find_scales = [&](const char* name, KvScales* scales) {
    return FindScales(kOp, name, features, layout, cache_dtype != dtype, "key", scales);
  };
  if (error.success()) error = find_scales("k_scale", &k_scale);
  if (error.success()) error = find_scales("v_scale", &v_scale);
  if (error.failure()) return error;
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
  if (other_results.size() != (value_cache.has_value() ? 1 : 0)) {
    return InvalidArgument(kOp, "the call must have a result for each cache; got ",
                           other_results.size() + 1);
  }
  if (value_cache.has_value() &&
      (**other_results.get<ffi::AnyBuffer>(0)).untyped_data() != value_cache->untyped_data()) {
    return InvalidArgument(kOp, "the second result must alias value_cache ",
                           "(output_to_operand_aliasing); got a buffer of its own");
  }
  *params = {cache,
             key.untyped_data(),
             value.untyped_data(),
             slot_mapping.untyped_data(),
             slot_mapping.element_type() == ffi::S64,
             layout.num_blocks,
             layout.block_size,
             num_tokens,
             num_kv_heads,
             head_size,
             dtype,
             cache_dtype,
             k_scale,
             v_scale};
  return ffi::Error::Success();
}

// Before anything is written, so that an error leaves the cache as it was.
ffi::Error CheckSlots(const Params& p) {
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    if (p.Slot(token) >= p.NumSlots()) {
      return InvalidArgument(kOp, "slot_mapping[", token,
                             "] must be below num_blocks * block_size=", p.NumSlots(),
                             " (negative for padding); got ", p.Slot(token));
    }
  }
  return ffi::Error::Success();
}

ffi::Error OnCpu(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                 ffi::AnyBuffer slot_mapping, ffi::RemainingArgs other_operands,
                 ffi::Result<ffi::AnyBuffer> updated, ffi::RemainingRets other_results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  ffi::Error error = MakeParams(kv_cache, key, value, slot_mapping, other_operands, *updated,
                                other_results, attributes, &params);
  if (error.success()) error = CheckSlots(params);
  if (error.success()) RunOnCpu(params, executor);
  return error;
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                  ffi::AnyBuffer slot_mapping, ffi::RemainingArgs other_operands,
                  ffi::Result<ffi::AnyBuffer> updated, ffi::RemainingRets other_results,
                  const ffi::Dictionary& attributes, void* stream) {
  Params params;
  ffi::Error error = MakeParams(kv_cache, key, value, slot_mapping, other_operands, *updated,
                                other_results, attributes, &params);
  if (error.success()) error = Launched(kOp, RunOnCuda(params, stream));
  return error;
}
#endif

// What a call has on every platform.
auto Bind() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // kv_cache
      .Arg<ffi::AnyBuffer>()  // key
      .Arg<ffi::AnyBuffer>()  // value
      .Arg<ffi::AnyBuffer>()  // slot_mapping
      .RemainingArgs()        // value_cache, if it is apart
      .Ret<ffi::AnyBuffer>()  // kv_cache, updated in place
      .RemainingRets()        // value_cache likewise
      .Attrs();
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
