# libqsim_ops_cuda. nvcc compiles kernels/cuda/*.cu without any torch header; the bindings are host C++ for g++.
# Against a CPU torch (QSIM_CUDA=CHECK) the link leaves c10::cuda symbols undefined: scripts/audit_cuda_symbols.sh compares them
# with the list of what a CUDA torch provides.
include(CudaLanguage)

file(GLOB cuda_kernels CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/kernels/cuda/*.cu")
file(GLOB cuda_bindings CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cpp")
add_library(qsim_kernels_cuda OBJECT ${cuda_kernels})
target_include_directories(qsim_kernels_cuda PUBLIC "${PROJECT_SOURCE_DIR}/kernels/include")
target_compile_options(qsim_kernels_cuda PRIVATE ${QSIM_NVCC_NUMERICS})
# A register spill is an error in the check of the architectures that the kernels are tuned for. Elsewhere it costs time, and a
# build that fails for it would cost more.
set(untuned ${CMAKE_CUDA_ARCHITECTURES})
list(REMOVE_ITEM untuned 80 90)
if(QSIM_CUDA STREQUAL "CHECK")
  target_compile_options(qsim_kernels_cuda PRIVATE -no-compress)  # tests/ptx runs the PTX in these objects
endif()
if(QSIM_CUDA STREQUAL "CHECK" AND NOT untuned)
  target_compile_options(qsim_kernels_cuda PRIVATE -Xptxas=--warn-on-spills -Xptxas=--warning-as-error)
endif()

add_library(qsim_ops_cuda SHARED ${cuda_bindings})
target_include_directories(qsim_ops_cuda PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}/cuda")
target_link_libraries(qsim_ops_cuda PRIVATE qsim_kernels_cuda qsim_warnings LibTorch::torch CUDA::cudart)
target_precompile_headers(qsim_ops_cuda PRIVATE <torch/library.h>)
set_target_properties(qsim_ops_cuda PROPERTIES INSTALL_RPATH "$ORIGIN/../torch/lib" UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 7)
if(LibTorch_CUDA_VERSION)
  string(REGEX MATCH "^[0-9]+" torch_cuda_major "${LibTorch_CUDA_VERSION}")
  if(NOT CUDAToolkit_VERSION_MAJOR EQUAL torch_cuda_major)
    message(WARNING "nvcc is CUDA ${CUDAToolkit_VERSION} but torch was built for CUDA ${LibTorch_CUDA_VERSION}")
  endif()
  target_link_libraries(qsim_ops_cuda PRIVATE LibTorch::torch_cuda)
else()
  target_compile_definitions(qsim_ops_cuda PRIVATE C10_CUDA_NO_CMAKE_CONFIGURE_FILE)  # a CPU torch has no such file
endif()
if(NOT QSIM_CUDA STREQUAL "CHECK")
  install(TARGETS qsim_ops_cuda LIBRARY DESTINATION qsim)
endif()
