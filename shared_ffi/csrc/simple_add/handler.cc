#include "ffi/handler.h"

#include "cpu.h"
#include "cuda.h"
#include "params.h"

namespace xla_gpu::simple_add {
namespace {

constexpr char kOp[] = "simple_add";

ffi::Error MakeParams(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, const ffi::AnyBuffer& sum,
                      Params* params) {
  const auto is_shape_of_a = [&](const ffi::AnyBuffer& x) {
    const auto want = a.dimensions(), have = x.dimensions();
    return std::equal(want.begin(), want.end(), have.begin(), have.end());
  };
  if (a.element_type() != ffi::F32) {
    return DTypeError(kOp, "a", "dtype float32", a);
  }
  if (!is_shape_of_a(b)) {
    return ShapeError(kOp, "b", ShapeName(a), b);
  }
  if (b.element_type() != ffi::F32) {
    return DTypeError(kOp, "b", "dtype float32", b);
  }
  if (sum.element_type() != ffi::F32 || !is_shape_of_a(sum)) {
    return InvalidArgument(kOp, "the result must be float32 ", ShapeName(a), "; got ",
                           DTypeName(sum), " ", ShapeName(sum));
  }
  params->a = a.typed_data<float>();
  params->b = b.typed_data<float>();
  params->sum = sum.typed_data<float>();
  params->num_elements = static_cast<int64_t>(a.element_count());
  return ffi::Error::Success();
}

ffi::Error OnCpu(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> sum,
                 const Executor& executor) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams(a, b, *sum, &params));
  RunOnCpu(params, executor);
  return ffi::Error::Success();
}

#ifdef XLA_GPU_CUDA
ffi::Error OnCuda(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> sum,
                  void* stream) {
  Params params;
  XLA_GPU_RETURN_IF_ERROR(MakeParams(a, b, *sum, &params));
  return Launched(kOp, RunOnCuda(params, stream));
}
#endif

// What a call has on every platform.
auto Bind() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()   // a
      .Arg<ffi::AnyBuffer>()   // b
      .Ret<ffi::AnyBuffer>();  // sum
}

}  // namespace
}  // namespace xla_gpu::simple_add

XLA_FFI_DEFINE_HANDLER_SYMBOL(SimpleAddCpu, xla_gpu::simple_add::OnCpu,
                              xla_gpu::simple_add::Bind().Ctx<xla_gpu::Executor>());

#ifdef XLA_GPU_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(SimpleAddCuda, xla_gpu::simple_add::OnCuda,
                              xla_gpu::simple_add::Bind().Ctx<xla::ffi::PlatformStream<void*>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
#endif
