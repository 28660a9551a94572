# The CUDA handlers: every cuda.cu of an op, and the tensor core kernels once for each type of
# query, type of cache and head size, so that the build uses all cores.

# Head sizes with a tensor core kernel. A head of another size takes the next larger one. For caches
# of 8 bits there are fewer: so few bytes are read that padding a head costs nothing. 576 is for
# latent attention only, 512 for all else.
set(XLA_GPU_HEAD_SIZES 64 80 96 112 128 192 256 512 576)
set(XLA_GPU_HEAD_SIZES_OF_8_BITS 64 128 256)
# Columns that each lane of the kernel without tensor cores adds up: 32 times as many are a head.
set(XLA_GPU_CUDA_CORE_COLUMNS 1 2 4 8 16 18)

# Types of the query with tensor core kernels. The others are computed on CUDA cores.
set(XLA_GPU_TENSOR_CORE_TYPES Half BFloat16)

set(SHARE "${XLA_GPU_KERNELS}")
# The GPUs that are compiled for, as CMake names them.
set(ARCHITECTURES ${XLA_GPU_ARCHITECTURES})
if(XLA_GPU_ARCHITECTURES STREQUAL "all")
  # Machine code for each generation, and PTX once, for later ones: packed, PTX for a unit is larger than machine code.
  set(ARCHITECTURES 80-real 90a-real 100 120-real)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")  # Grace's GPUs are Hopper and later
    list(REMOVE_ITEM ARCHITECTURES 80-real)
  endif()
elseif(XLA_GPU_ARCHITECTURES STREQUAL "native")  # the GPUs of this machine, or Hopper without one
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE CAPABILITIES ERROR_QUIET RESULT_VARIABLE FAILED)
  set(ARCHITECTURES)
  if(NOT FAILED)
    string(REGEX MATCHALL "[0-9]+[.][0-9]" CAPABILITIES "${CAPABILITIES}")
    # The code of a generation's first GPU runs on the others. But 8.9 has conversions of float8_e4m3
    # that 8.0 has not.
    list(TRANSFORM CAPABILITIES REPLACE "^8[.]9$" "89-real" OUTPUT_VARIABLE ARCHITECTURES)
    list(TRANSFORM ARCHITECTURES REPLACE "[.][0-9]$" "0-real")
    list(TRANSFORM ARCHITECTURES REPLACE "^90-" "90a-")
    list(FILTER ARCHITECTURES EXCLUDE REGEX "^[1-7]0-")  # the kernels need 8.0
    list(REMOVE_DUPLICATES ARCHITECTURES)
  endif()
  if(NOT ARCHITECTURES)  # what does not run here need not be fast: fewer kernels, in less time
    set(ARCHITECTURES 90a-real)
    if(SHARE STREQUAL "all")
      set(SHARE few)
    endif()
  endif()
endif()
if(SHARE STREQUAL "few")  # that are compiled, and do not run
  set(XLA_GPU_HEAD_SIZES 128 256)
  set(XLA_GPU_HEAD_SIZES_OF_8_BITS 256)
  set(XLA_GPU_CUDA_CORE_COLUMNS 18)
  set(XLA_GPU_TENSOR_CORE_TYPES BFloat16)
  set(NOTE "with few kernels")
elseif(SHARE STREQUAL "tested")  # on the emulated GPU
  set(XLA_GPU_HEAD_SIZES 128 256 512 576)
  set(XLA_GPU_HEAD_SIZES_OF_8_BITS 128)
  set(XLA_GPU_CUDA_CORE_COLUMNS 4 18)
elseif(SHARE STREQUAL "bfloat16")
  set(XLA_GPU_TENSOR_CORE_TYPES BFloat16)
elseif(NOT SHARE STREQUAL "all")
  message(FATAL_ERROR "XLA_GPU_KERNELS must be all, few, tested or bfloat16; got ${SHARE}")
endif()
message(STATUS "GPUs to compile for: ${ARCHITECTURES}; head sizes: ${XLA_GPU_HEAD_SIZES}")

list(JOIN XLA_GPU_CUDA_CORE_COLUMNS ", " COLUMNS)
list(JOIN XLA_GPU_HEAD_SIZES ", " HEAD_SIZES)
list(JOIN XLA_GPU_HEAD_SIZES_OF_8_BITS ", " OF_8_BITS)
# Caches of 4 bits have the fewest: a smaller head takes the next larger size.
set(HEAD_SIZES_OF_4_BITS ${XLA_GPU_HEAD_SIZES_OF_8_BITS})
list(FILTER HEAD_SIZES_OF_4_BITS EXCLUDE REGEX "^64$")
list(JOIN XLA_GPU_TENSOR_CORE_TYPES ", " TYPES)
# Only sm_90a has the instructions of the prefill kernel.
set(PREFILL_HEAD_SIZES ${XLA_GPU_HEAD_SIZES})
list(FILTER PREFILL_HEAD_SIZES INCLUDE REGEX "^(64|128|192|256)$")
set(PREFILL_HEAD_SIZES_OF_8_BITS ${XLA_GPU_HEAD_SIZES_OF_8_BITS})
list(FILTER PREFILL_HEAD_SIZES_OF_8_BITS INCLUDE REGEX "^(64|128)$")
if(NOT ARCHITECTURES MATCHES "90a")
  set(PREFILL_HEAD_SIZES)
  set(PREFILL_HEAD_SIZES_OF_8_BITS)
endif()
# The decode kernel reads no padding of a head, so few sizes suffice.
set(DECODE_HEAD_SIZES ${XLA_GPU_HEAD_SIZES})
list(FILTER DECODE_HEAD_SIZES INCLUDE REGEX "^(128|256)$")
set(DECODE_HEAD_SIZES_OF_8_BITS ${XLA_GPU_HEAD_SIZES_OF_8_BITS})
list(FILTER DECODE_HEAD_SIZES_OF_8_BITS INCLUDE REGEX "^128$")
# The derivative: a head of another size takes the next larger one.
set(GRADIENT_HEAD_SIZES ${XLA_GPU_HEAD_SIZES})
list(FILTER GRADIENT_HEAD_SIZES INCLUDE REGEX "^(64|128|256)$")
# Wider heads leave no registers for the sums of K and V on sm_90a.
set(HOPPER_GRADIENT_HEAD_SIZES ${PREFILL_HEAD_SIZES})
list(FILTER HOPPER_GRADIENT_HEAD_SIZES INCLUDE REGEX "^(64|128)$")
# As further arguments of a template.
foreach(sizes GRADIENT_HEAD_SIZES HOPPER_GRADIENT_HEAD_SIZES HEAD_SIZES_OF_4_BITS PREFILL_HEAD_SIZES PREFILL_HEAD_SIZES_OF_8_BITS DECODE_HEAD_SIZES DECODE_HEAD_SIZES_OF_8_BITS)
  list(TRANSFORM ${sizes} PREPEND ", " OUTPUT_VARIABLE MORE_${sizes})
  list(JOIN MORE_${sizes} "" MORE_${sizes})
endforeach()
list(JOIN ARCHITECTURES ", " NAMES_OF_ARCHITECTURES)
if(XLA_GPU_LAB)
  string(APPEND NOTE " to measure ${XLA_GPU_LAB}")
endif()
if(NOTE)
  string(APPEND NAMES_OF_ARCHITECTURES ", ${NOTE}")
endif()
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/generated/cuda_build.h"
     CONTENT "#define XLA_GPU_ARCHITECTURES \"@NAMES_OF_ARCHITECTURES@\"
#define XLA_GPU_CUDA_CORE_COLUMNS @COLUMNS@
#define XLA_GPU_TENSOR_CORE_TYPES @TYPES@
#define XLA_GPU_TENSOR_CORE_HEAD_SIZES @HEAD_SIZES@
#define XLA_GPU_TENSOR_CORE_HEAD_SIZES_OF_8_BITS @OF_8_BITS@
#define XLA_GPU_TENSOR_CORE_HEAD_SIZES_OF_4_BITS @MORE_HEAD_SIZES_OF_4_BITS@
#define XLA_GPU_GRADIENT_HEAD_SIZES @MORE_GRADIENT_HEAD_SIZES@
#define XLA_GPU_HOPPER_GRADIENT_HEAD_SIZES @MORE_HOPPER_GRADIENT_HEAD_SIZES@
#define XLA_GPU_PREFILL_HEAD_SIZES @MORE_PREFILL_HEAD_SIZES@
#define XLA_GPU_PREFILL_HEAD_SIZES_OF_8_BITS @MORE_PREFILL_HEAD_SIZES_OF_8_BITS@
#define XLA_GPU_DECODE_HEAD_SIZES @MORE_DECODE_HEAD_SIZES@
#define XLA_GPU_DECODE_HEAD_SIZES_OF_8_BITS @MORE_DECODE_HEAD_SIZES_OF_8_BITS@\n" @ONLY)

add_library(cuda_settings INTERFACE)
target_include_directories(cuda_settings INTERFACE "${CMAKE_BINARY_DIR}/generated")
target_compile_features(cuda_settings INTERFACE cxx_std_17)
enable_language(CUDA)
# Products are fused where the sources say so (gpu::Fma).
target_compile_options(cuda_settings INTERFACE -Xptxas=-v -fmad=false)
list(TRANSFORM XLA_GPU_LAB PREPEND -D OUTPUT_VARIABLE LAB)
target_compile_options(cuda_settings INTERFACE ${LAB})
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  target_compile_options(cuda_settings INTERFACE --compress-mode=size)  # a third of the default's size
endif()
set_target_properties(handlers PROPERTIES CUDA_ARCHITECTURES "${ARCHITECTURES}")
target_compile_definitions(handlers PUBLIC XLA_GPU_CUDA)

# By its name, so that builds for several Pythons share the objects. With -I, as pip's build
# environment has modules of its own on PYTHONPATH, which are gone when ninja runs again.
find_program(PYTHON3 python3)
set(ANY_PYTHON python3)
if(NOT PYTHON3)
  set(ANY_PYTHON "${Python_EXECUTABLE}")
endif()

function(add_cuda_objects name)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    CUDA_ARCHITECTURES "${ARCHITECTURES}"
    CUDA_COMPILER_LAUNCHER "${ANY_PYTHON};-I;${CMAKE_SOURCE_DIR}/cmake/resources.py")
  target_link_libraries(${name} PRIVATE cuda_settings)
  target_sources(handlers PRIVATE $<TARGET_OBJECTS:${name}>)
  set_property(GLOBAL APPEND PROPERTY CUDA_OBJECTS $<TARGET_OBJECTS:${name}>)
endfunction()

file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS */cuda.cu */cuda/run.cu)
add_cuda_objects(cuda ${CUDA_SOURCES})
# PTX for sm_8x has no instruction that waits for the kernel before, and a later GPU may compile it.
if(NOT ARCHITECTURES MATCHES "(^|;)8[0-9]+(-virtual)?(;|$)")
  target_compile_definitions(cuda PRIVATE XLA_GPU_LAUNCHES_EARLY)
endif()

if(ARCHITECTURES MATCHES "90a")  # a decode kernel with more shared memory, and the prefill kernel
  target_compile_definitions(cuda PRIVATE XLA_GPU_HAS_HOPPER_KERNELS)
endif()

# Wheels for all GPUs have code for 8.9 where it is faster: for caches of float8_e4m3.
set(ARCHITECTURES_OF_Float8E4M3 "${ARCHITECTURES}")
if(XLA_GPU_ARCHITECTURES STREQUAL "all" AND "80-real" IN_LIST ARCHITECTURES)
  list(APPEND ARCHITECTURES_OF_Float8E4M3 89-real)
endif()

# One unit for each type of query, type of cache and head size. Further arguments: definitions.
function(add_kernel_of_caches kernel source architectures head_sizes head_sizes_of_8_bits head_sizes_of_4_bits)
  foreach(storage ${XLA_GPU_TENSOR_CORE_TYPES})
    foreach(cache ${storage} Float8E4M3 Float8E5M2 int8_t Int4OrInt8 ScaledCode)
      set(sizes ${head_sizes_of_8_bits})
      if(cache STREQUAL storage)
        set(sizes ${head_sizes})
      elseif(cache MATCHES "^(Int4OrInt8|ScaledCode)$")
        set(sizes ${head_sizes_of_4_bits})
      endif()
      foreach(head_size ${sizes})
        set(name ${kernel}_${storage}_${cache}_${head_size})
        add_cuda_objects(${name} paged_attention/cuda/${source})
        set(targets "${architectures}")
        if(cache STREQUAL "Float8E4M3" AND architectures STREQUAL ARCHITECTURES)
          set(targets "${ARCHITECTURES_OF_Float8E4M3}")
        endif()
        set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${targets}")
        target_compile_definitions(${name} PRIVATE
          XLA_GPU_STORAGE=${storage} XLA_GPU_CACHE=${cache} XLA_GPU_HEAD_SIZE=${head_size} ${ARGN})
      endforeach()
    endforeach()
  endforeach()
endfunction()

add_kernel_of_caches(tensor_core portable/tensor_core.cu "${ARCHITECTURES}"
                     "${XLA_GPU_HEAD_SIZES}" "${XLA_GPU_HEAD_SIZES_OF_8_BITS}" "${HEAD_SIZES_OF_4_BITS}")
add_kernel_of_caches(decode decode/kernel.cu "${ARCHITECTURES}"
                     "${DECODE_HEAD_SIZES}" "${DECODE_HEAD_SIZES_OF_8_BITS}" "" XLA_GPU_KIB=kAnyMultiprocessor)
if(ARCHITECTURES MATCHES "90a")  # the same with more shared memory
  add_kernel_of_caches(large_decode decode/kernel.cu 90a-real
                       "${DECODE_HEAD_SIZES}" "${DECODE_HEAD_SIZES_OF_8_BITS}" "" XLA_GPU_KIB=kLargeMultiprocessor)
endif()
add_kernel_of_caches(prefill sm90/prefill.cu 90a-real "${PREFILL_HEAD_SIZES}" "${PREFILL_HEAD_SIZES_OF_8_BITS}" "")

function(add_gradients kernel source architectures)  # further arguments: head sizes
  foreach(storage ${XLA_GPU_TENSOR_CORE_TYPES})
    foreach(head_size ${ARGN})
      set(name ${kernel}_${storage}_${head_size})
      add_cuda_objects(${name} varlen_attention/cuda/${source})
      set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
      target_compile_definitions(${name} PRIVATE XLA_GPU_STORAGE=${storage} XLA_GPU_HEAD_SIZE=${head_size})
    endforeach()
  endforeach()
endfunction()

add_gradients(gradients tensor_core.cu "${ARCHITECTURES}" ${GRADIENT_HEAD_SIZES})
add_gradients(hopper_gradients sm90/gradients.cu 90a-real ${HOPPER_GRADIENT_HEAD_SIZES})

# cudart is linked statically, so that the library loads on a machine without a driver.
get_filename_component(CUDA_ROOT "${CMAKE_CUDA_COMPILER}" REALPATH)
get_filename_component(CUDA_ROOT "${CUDA_ROOT}/../.." ABSOLUTE)
find_library(CUDART_STATIC cudart_static REQUIRED NO_DEFAULT_PATH
             PATHS "${CUDA_ROOT}" "${CMAKE_CUDA_COMPILER_TOOLKIT_ROOT}" PATH_SUFFIXES lib lib64 targets/x86_64-linux/lib targets/sbsa-linux/lib)
target_link_libraries(handlers PRIVATE "${CUDART_STATIC}" dl rt)
