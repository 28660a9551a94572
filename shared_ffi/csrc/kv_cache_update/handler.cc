#include "cpu.h"
#include "cuda.h"
#include "ffi/kv_cache_operand.h"
#include "ffi/token_rows_operand.h"
#include "params.h"
#include "slots.h"

namespace xla_gpu::kv_cache_update {
namespace {

constexpr char kOp[] = "kv_cache_update";

// The arrays that every call has.
struct Operands {
  ffi::AnyBuffer kv_cache;
  ffi::AnyBuffer key;
  ffi::AnyBuffer value;
  ffi::AnyBuffer slot_mapping;
};

constexpr size_t kNumOperands = 4;

ffi::Error ReadKeyAndValue(const Operands& operands, const TokenRowsLayout& layout, Params* p) {
  const auto& [kv_cache, key, value, slot_mapping] = operands;
  TokenRows keys = {}, values = {};
  XLA_GPU_RETURN_IF_ERROR(
      ReadTokenRows(kOp, "key", key, layout, "[num_tokens, num_kv_heads, head_size]", &keys));
  p->num_tokens = keys.num_tokens;
  p->num_kv_heads = keys.num_heads;
  p->head_size = keys.head_size;
  p->key_stride = keys.stride;
  const bool is_copied = key.element_type() == kv_cache.element_type();
  if (!StorageType(key.element_type(), &p->dtype) &&
      !(is_copied && StorageTypeOf8Bits(key.element_type(), &p->dtype))) {
    return DTypeError(kOp, "key",
                      "dtype float32, float16 or bfloat16, or one of 8 bits that kv_cache has, too",
                      key);
  }
  const std::string shape =
      StrCat("[num_tokens=", p->num_tokens, ", num_kv_heads=", p->num_kv_heads,
             ", head_size=", p->head_size, "]");
  if (HasShape(value, {p->num_tokens, p->num_kv_heads, 0})) {
    values = {p->num_tokens, p->num_kv_heads, 0, 0};
  } else {
    XLA_GPU_RETURN_IF_ERROR(ReadTokenRows(kOp, "value", value, layout, shape, &values));
    if (values.num_tokens != keys.num_tokens || values.num_heads != keys.num_heads ||
        values.head_size != keys.head_size) {
      return ShapeError(kOp, "value", shape, value);
    }
  }
  p->value_head_size = values.head_size;
  p->value_stride = values.stride;
  if (value.element_type() != key.element_type()) {
    return DTypeError(kOp, "value", StrCat("key's dtype ", DTypeName(key)), value);
  }
  p->key = key.untyped_data();
  p->value = value.untyped_data();
  return ffi::Error::Success();
}

ffi::Error ReadSlotMapping(const ffi::AnyBuffer& slot_mapping, Params* p) {
  if (!HasShape(slot_mapping, {p->num_tokens})) {
    return ShapeError(kOp, "slot_mapping", StrCat("[num_tokens=", p->num_tokens, "]"),
                      slot_mapping);
  }
  if (slot_mapping.element_type() != ffi::S32 && slot_mapping.element_type() != ffi::S64) {
    return DTypeError(kOp, "slot_mapping", "dtype int32 or int64", slot_mapping);
  }
  p->slot_mapping = slot_mapping.untyped_data();
  p->slots_are_int64 = slot_mapping.element_type() == ffi::S64;
  return ffi::Error::Success();
}

// The results are the caches themselves, updated in place.
ffi::Error CheckResults(const KvCacheArrays& caches, const ffi::AnyBuffer& updated,
                        const ffi::RemainingRets& others) {
  const auto& [kv_cache, value_cache] = caches;
  if (updated.untyped_data() != kv_cache.untyped_data()) {
    return InvalidArgument(kOp, "the result must alias kv_cache (output_to_operand_aliasing); ",
                           "got a buffer of its own");
  }
  if (others.size() != (value_cache.has_value() ? 1 : 0)) {
    return InvalidArgument(kOp, "the call must have a result for each cache; got ",
                           others.size() + 1);
  }
  if (value_cache.has_value() &&
      (**others.get<ffi::AnyBuffer>(0)).untyped_data() != value_cache->untyped_data()) {
    return InvalidArgument(kOp, "the second result must alias value_cache ",
                           "(output_to_operand_aliasing); got a buffer of its own");
  }
  return ffi::Error::Success();
}

// Checks by the same rules, in the same order and words, as shared_ffi/kv_cache_update.py.
ffi::Error MakeParams(const Operands& operands, const ffi::RemainingArgs& other_operands,
                      const ffi::AnyBuffer& updated, const ffi::RemainingRets& other_results,
                      const ffi::Dictionary& attributes, Params* params) {
  *params = {};
  AttributeReader reader(kOp, attributes);
  const KvLayout layout = KvLayout::Read(&reader);
  const TokenRowsLayout rows_layout = TokenRowsLayout::Read(&reader);
  const FeatureOperands features(kOp, kNumOperands, other_operands, &reader,
                                 {"value_cache", "k_scale", "v_scale"});
  XLA_GPU_RETURN_IF_ERROR(reader.Finish());
  KvCacheArrays caches = {operands.kv_cache, std::nullopt};
  XLA_GPU_RETURN_IF_ERROR(features.Find("value_cache", &caches.value_cache));
  XLA_GPU_RETURN_IF_ERROR(features.Finish());
  XLA_GPU_RETURN_IF_ERROR(ReadKeyAndValue(operands, rows_layout, params));
  if (params->value_head_size != params->head_size) {
    XLA_GPU_RETURN_IF_ERROR(CheckLatent(kOp, layout, features));
  }
  XLA_GPU_RETURN_IF_ERROR(
      ReadKvCache(kOp, caches, layout, params->num_kv_heads, "key", operands.key, params));
  XLA_GPU_RETURN_IF_ERROR(ReadScales(kOp, "k_scale", features, "key", *params, &params->k_scale));
  XLA_GPU_RETURN_IF_ERROR(ReadScales(kOp, "v_scale", features, "key", *params, &params->v_scale));
  XLA_GPU_RETURN_IF_ERROR(ReadSlotMapping(operands.slot_mapping, params));
  return CheckResults(caches, updated, other_results);
}

// Runs before anything is written, so that an error leaves the cache as it was.
ffi::Error CheckSlots(const Params& params) {
  const std::string fault = SlotFault(params);
  return fault.empty() ? ffi::Error::Success() : InvalidArgument(kOp, fault);
}

ffi::Error OnCpu(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                 ffi::AnyBuffer slot_mapping, ffi::RemainingArgs other_operands,
                 ffi::Result<ffi::AnyBuffer> updated, ffi::RemainingRets other_results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams({kv_cache, key, value, slot_mapping}, other_operands, *updated,
                                     other_results, attributes, &params));
  // The caller's other threads may write to the slots while the call runs.
  const auto* slots = static_cast<const char*>(params.slot_mapping);
  const std::vector<char> copy(slots, slots + slot_mapping.size_bytes());
  params.slot_mapping = copy.data();
  XLA_GPU_RETURN_IF_ERROR(CheckSlots(params));
  RunOnCpu(params, executor);
  return ffi::Error::Success();
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::AnyBuffer kv_cache, ffi::AnyBuffer key, ffi::AnyBuffer value,
                  ffi::AnyBuffer slot_mapping, ffi::RemainingArgs other_operands,
                  ffi::Result<ffi::AnyBuffer> updated, ffi::RemainingRets other_results,
                  const ffi::Dictionary& attributes, void* stream) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams({kv_cache, key, value, slot_mapping}, other_operands, *updated,
                                     other_results, attributes, &params));
  return Launched(kOp, RunOnCuda(params, stream));
}
#endif

// What a call has on every platform.
auto Bind() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // kv_cache
      .Arg<ffi::AnyBuffer>()  // key
      .Arg<ffi::AnyBuffer>()  // value
      .Arg<ffi::AnyBuffer>()  // slot_mapping
      .RemainingArgs()        // operands of features
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
