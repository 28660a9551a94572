# The CPU kernels: each cpu/kernel.cc once for every instruction set, the best first. At run time the
# best that the processor has is used. XLA_GPU_FOR_CPU_INSTRUCTION_SETS(f) is f(name) for each of them.

if(XLA_GPU_CPU_INSTRUCTION_SETS)
  set(CPU_INSTRUCTION_SETS ${XLA_GPU_CPU_INSTRUCTION_SETS})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(CPU_INSTRUCTION_SETS avx512_bf16 avx512 avx2 baseline)
else()
  set(CPU_INSTRUCTION_SETS baseline)
endif()
set(CPU_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)
set(CPU_FLAGS_avx512_bf16 ${CPU_FLAGS_avx512} -mavx512bf16 -mavx512vbmi)
set(CPU_FLAGS_avx2 -mavx2 -mfma -mf16c)

file(GLOB CPU_KERNEL_SOURCES CONFIGURE_DEPENDS */cpu/kernel.cc)
foreach(name ${CPU_INSTRUCTION_SETS})
  add_library(cpu_${name} OBJECT ${CPU_KERNEL_SOURCES})
  set_target_properties(cpu_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  target_compile_features(cpu_${name} PRIVATE cxx_std_17)
  # -fno-exceptions: the kernels throw nothing, and the linker would share exception tables between
  # instruction sets.
  target_compile_options(cpu_${name} PRIVATE
    ${OPTIMIZE} -Wall -Wextra -ffp-contract=off -fno-exceptions ${CPU_FLAGS_${name}})
  target_compile_definitions(cpu_${name} PRIVATE XLA_GPU_INSTRUCTION_SET=${name})
  target_sources(handlers PRIVATE $<TARGET_OBJECTS:cpu_${name}>)
endforeach()

list(TRANSFORM CPU_INSTRUCTION_SETS REPLACE "(.+)" "f(\\1)" OUTPUT_VARIABLE FOR_EACH)
list(JOIN FOR_EACH " " FOR_EACH)
file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/generated/cpu_instruction_sets.h"
     CONTENT "#define XLA_GPU_FOR_CPU_INSTRUCTION_SETS(f) @FOR_EACH@\n" @ONLY)
target_include_directories(handlers PRIVATE "${CMAKE_BINARY_DIR}/generated")
