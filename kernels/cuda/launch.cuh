// How kernels are launched: by a call, not by <<<>>>, so that tests can compile them as C++ (tests/cuda_emulation).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace qsim::cuda {

// The dynamic shared memory of a block; LaunchShape says how much there is.
extern __shared__ __align__(16) unsigned char dynamic_shared[];

struct LaunchShape {
  dim3 blocks, threads;
  std::size_t shared_bytes = 0;
};

// Asks for more than the 48 KB of shared memory that every kernel may have; no launch, so it may happen during capture.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), LaunchShape shape, cudaStream_t stream, Arguments&&... arguments) {
  if (shape.shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace qsim::cuda
