// The names of XLA's dtypes, which are NumPy's and PyTorch's too.
#pragma once

#include <cstdint>
#include <string>

#include "xla/ffi/api/c_api.h"

namespace xla_gpu {

struct NamedDType {
  XLA_FFI_DataType dtype;
  const char* name;
  // PyTorch's number in C++, where the interface of PyTorch 2.9 has no function for it; 0: it has.
  int32_t torch_number = 0;
};

inline constexpr NamedDType kDTypes[] = {
    {XLA_FFI_DataType_F64, "float64"},
    {XLA_FFI_DataType_F32, "float32"},
    {XLA_FFI_DataType_F16, "float16"},
    {XLA_FFI_DataType_BF16, "bfloat16"},
    {XLA_FFI_DataType_F8E4M3FN, "float8_e4m3fn"},
    {XLA_FFI_DataType_F8E5M2, "float8_e5m2"},
    {XLA_FFI_DataType_F8E8M0FNU, "float8_e8m0fnu", 44},
    {XLA_FFI_DataType_F4E2M1FN, "float4_e2m1fn", /*PyTorch has none*/ -1},
    {XLA_FFI_DataType_S64, "int64"},
    {XLA_FFI_DataType_S32, "int32"},
    {XLA_FFI_DataType_S16, "int16"},
    {XLA_FFI_DataType_S8, "int8"},
    {XLA_FFI_DataType_U64, "uint64"},
    {XLA_FFI_DataType_U32, "uint32"},
    {XLA_FFI_DataType_U16, "uint16"},
    {XLA_FFI_DataType_U8, "uint8"},
    {XLA_FFI_DataType_U8, "float4_e2m1fn_x2", 45},  // of which an element is a pair
    {XLA_FFI_DataType_PRED, "bool"},
};

inline const char* DTypeName(XLA_FFI_DataType dtype) {
  for (const NamedDType& known : kDTypes) {
    if (known.dtype == dtype) return known.name;
  }
  return "another type";
}

// XLA_FFI_DataType_INVALID if no dtype has this name.
inline XLA_FFI_DataType DTypeNamed(const std::string& name) {
  for (const NamedDType& known : kDTypes) {
    if (known.name == name) return known.dtype;
  }
  return XLA_FFI_DataType_INVALID;
}

}  // namespace xla_gpu
