#include "ffi/handler.h"

#include <array>

#include "params.h"
#include "run.h"

namespace xla_gpu::simple_add {
namespace {

constexpr char kOp[] = "simple_add";

ffi::Error MakeParams(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                      const ffi::Dictionary& attributes, Params* p) {
  CallReader call(kOp, operands, results, attributes, {"a", "b"});
  XLA_GPU_RETURN_IF_ERROR(call.error());
  const std::array shape = {call.Find("a")->dimensions()};
  p->a = call.Operand<float>("a", {ffi::F32}, shape);
  p->b = call.Operand<float>("b", {ffi::F32}, shape);
  p->sum = static_cast<float*>(call.Result(0, "sum", {ffi::F32}, shape));
  p->num_elements = static_cast<int64_t>(call.Find("a")->element_count());
  return call.Finish();
}

ffi::Error OnCpu(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 const ffi::Dictionary& attributes, const Executor& executor) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams(operands, results, attributes, &params));
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

XLA_GPU_DEFINE_HANDLERS(SimpleAdd, kOp)

}  // namespace xla_gpu::simple_add
