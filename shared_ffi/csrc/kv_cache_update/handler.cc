#include <array>

#include "ffi/kv_cache_operand.h"
#include "ffi/token_rows_operand.h"
#include "params.h"
#include "run.h"
#include "slots.h"

namespace xla_gpu::kv_cache_update {
namespace {

constexpr char kOp[] = "kv_cache_update";

ffi::Error MakeParams(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                      const ffi::Dictionary& attributes, Params* p) {
  *p = {};
  CallReader call(kOp, operands, results, attributes, {"kv_cache", "key", "value", "slot_mapping"},
                  {"value_cache", "k_scale", "v_scale"});
  XLA_GPU_RETURN_IF_ERROR(call.error());
  const auto layout = TokenRowsLayout::Read(&call);
  const ffi::DataType key_dtype = call.Find("key")->element_type();
  const bool is_copied = key_dtype == call.Find("kv_cache")->element_type();
  const TokenRows keys =
      ReadTokenRows(&call, "key", layout, is_copied ? kStorageDTypes : kTensorDTypes);
  const TokenRows values = ReadTokenRows(&call, "value", layout.OfValues(&call), {key_dtype});
  p->slot_mapping = call.Operand("slot_mapping", {ffi::S32, ffi::S64}, {{keys.num_tokens}});
  XLA_GPU_RETURN_IF_ERROR(call.error());
  if (values.num_tokens != keys.num_tokens || values.num_heads != keys.num_heads ||
      (values.head_size != keys.head_size && values.head_size != 0 && !call.Find("value_cache"))) {
    call.Refuse("value", "have the shape of key, or no columns, unless there is value_cache");
  }
  p->key = keys.data;
  p->value = values.data;
  p->key_stride = keys.stride;
  p->value_stride = values.stride;
  p->slots_are_int64 = call.Find("slot_mapping")->element_type() == ffi::S64;
  p->num_tokens = keys.num_tokens;
  p->head_size = keys.head_size;
  p->value_head_size = values.head_size;
  p->dtype = keys.dtype;
  ReadKvCache(&call, "key", keys, p);
  XLA_GPU_RETURN_IF_ERROR(call.error());
  if (p->num_kv_heads != keys.num_heads) {
    call.Refuse("kv_cache", "have key's num_kv_heads=", keys.num_heads);
  }
  p->k_scale = ReadScales(&call, "k_scale", *p);
  p->v_scale = ReadScales(&call, "v_scale", *p);
  // The results are the caches themselves, updated in place.
  size_t number = 0;
  for (const char* name : {"kv_cache", "value_cache"}) {
    const auto cache = call.Find(name);
    if (!cache.has_value()) continue;
    const std::array shape = {cache->dimensions()};
    if (call.Result(number++, name, {cache->element_type()}, shape) != cache->untyped_data()) {
      call.Fail("result ", name, " must alias its operand (output_to_operand_aliasing)");
    }
  }
  return call.Finish();
}

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams(operands, results, attributes, &params));
  // The caller's other threads may write to the slots while the call runs.
  const auto* slots = static_cast<const char*>(params.slot_mapping);
  const int64_t slot_bytes = params.slots_are_int64 ? sizeof(int64_t) : sizeof(int32_t);
  const std::vector<char> copy(slots, slots + params.num_tokens * slot_bytes);
  params.slot_mapping = copy.data();
  // Before anything is written, so that an error leaves the cache as it was.
  XLA_GPU_RETURN_IF_ERROR(FaultOf(kOp, SlotFault(params)));
  RunOnCpu(params, executor);
  return ffi::Error::Success();
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::RemainingArgs operands, ffi::RemainingRets results,
                  const ffi::Dictionary& attributes, void* stream) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams(operands, results, attributes, &params));
  return Launched(kOp, RunOnCuda(params, stream));
}
#endif

}  // namespace
}  // namespace xla_gpu::kv_cache_update

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvCacheUpdateCpu, xla_gpu::kv_cache_update::OnCpu,
                              xla_gpu::BindCall().Ctx<xla_gpu::Executor>());

#ifdef XLA_GPU_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvCacheUpdateCuda, xla_gpu::kv_cache_update::OnCuda,
                              xla_gpu::BindCall().Ctx<xla::ffi::PlatformStream<void*>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
