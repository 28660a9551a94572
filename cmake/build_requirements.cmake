# Copies files from Python packages that exist only while pip builds into the build folder. So the
# commands of a build are the same in every environment, and the second one reuses what the first one
# compiled.

# find_in_package(<variable> <package> <file>): sets the variable to the folder of an importable
# package, or to nothing unless the folder holds the file.
function(find_in_package variable package file)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import importlib.util as u; print(next(iter(u.find_spec('${package}').submodule_search_locations)))"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(folder AND EXISTS "${folder}/${file}")
    set(${variable} "${folder}" PARENT_SCOPE)
  else()
    set(${variable} "" PARENT_SCOPE)
  endif()
endfunction()

if(NOT nanobind_DIR)
  find_in_package(NANOBIND_DIR nanobind cmake/nanobind-config.cmake)
  if(NOT NANOBIND_DIR)
    message(FATAL_ERROR "No nanobind found: pip install 'nanobind>=2.9'.")
  endif()
  # A file that is the same as in the last environment keeps its time: nothing is compiled again.
  file(GLOB_RECURSE FILES RELATIVE "${NANOBIND_DIR}" "${NANOBIND_DIR}/*.*")
  list(FILTER FILES EXCLUDE REGEX "__pycache__")
  foreach(file ${FILES})
    get_filename_component(folder "${CMAKE_BINARY_DIR}/nanobind/${file}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    file(COPY_FILE "${NANOBIND_DIR}/${file}" "${CMAKE_BINARY_DIR}/nanobind/${file}" ONLY_IF_DIFFERENT)
  endforeach()
  set(nanobind_DIR "${CMAKE_BINARY_DIR}/nanobind/cmake" CACHE PATH "Folder of nanobind-config.cmake" FORCE)
endif()

# The XLA FFI headers, which jaxlib contains. Their version decides which runtimes load the
# handlers: those of jaxlib 0.8.0 (FFI 0.1) work with torch_xla 2.9.0 and everything newer, and
# torch_xla 2.9.0 refuses newer ones.
set(XLA_FFI_INCLUDE_DIR "${CMAKE_BINARY_DIR}/xla_ffi" CACHE PATH "Folder of xla/ffi/api/ffi.h")
if(NOT EXISTS "${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/ffi.h")
  find_in_package(JAXLIB_DIR jaxlib include/xla/ffi/api/ffi.h)
  if(NOT JAXLIB_DIR)
    message(FATAL_ERROR "No XLA FFI headers found: pip install jaxlib==0.8.0, or set "
                        "XLA_FFI_INCLUDE_DIR to its include folder.")
  endif()
  file(COPY "${JAXLIB_DIR}/include/xla" DESTINATION "${XLA_FFI_INCLUDE_DIR}")
endif()
file(STRINGS "${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/c_api.h" XLA_FFI_VERSION REGEX "#define XLA_FFI_API_M")
list(TRANSFORM XLA_FFI_VERSION REPLACE ".* " "")
list(JOIN XLA_FFI_VERSION "." XLA_FFI_VERSION)
if(NOT XLA_FFI_VERSION VERSION_EQUAL 0.1)
  message(FATAL_ERROR "The headers in ${XLA_FFI_INCLUDE_DIR} are of XLA FFI ${XLA_FFI_VERSION}: "
                      "torch_xla 2.9.0 would refuse the handlers. Use those of jaxlib 0.8.0 (0.1).")
endif()

# The CUDA compiler, unless the user named one with CUDACXX or -DCMAKE_CUDA_COMPILER. nvcc does not
# search the folder in which the wheels keep their libraries, hence -L.
if(XLA_GPU_CUDA AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(CUDA_WHEELS_DIR "${CMAKE_BINARY_DIR}/cuda" CACHE PATH "Folder of bin/nvcc")
  if(NOT EXISTS "${CUDA_WHEELS_DIR}/bin/nvcc")
    find_in_package(NVIDIA_DIR nvidia.cu13 bin/nvcc)
    if(NOT NVIDIA_DIR)
      message(FATAL_ERROR "No CUDA compiler found: pip install nvidia-cuda-nvcc nvidia-cuda-crt "
                          "nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-runtime (13.0), or set CUDACXX to "
                          "an nvcc, or build without CUDA: -DXLA_GPU_CUDA=OFF.")
    endif()
    file(COPY "${NVIDIA_DIR}/" DESTINATION "${CUDA_WHEELS_DIR}")
  endif()
  set(CMAKE_CUDA_COMPILER "${CUDA_WHEELS_DIR}/bin/nvcc")
  set(CMAKE_CUDA_FLAGS_INIT "-L${CUDA_WHEELS_DIR}/lib")
endif()
