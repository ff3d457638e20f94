# nvcc as a language of the directory that includes this, and how our kernels are compiled whatever is made of them.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # the default puts a second CUDA runtime into the process
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake < 3.26 does not know nvcc's -std=c++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit REQUIRED GLOBAL)  # the tests link CUDA::cudart too

set(QSIM_NVCC_NUMERICS -fmad=false --expt-relaxed-constexpr)  # -fmad=false: as -ffp-contract=off on the CPU
