// How kernels are launched: in blocks of kThreads where nothing else is said, as many as suit the device, and by a
// call, not by <<<>>>, so that tests can compile them as C++ (tests/cuda_emulation).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace qsim::cuda {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;  // of a block

// The dynamic shared memory of a block; LaunchShape says how much there is.
extern __shared__ __align__(16) unsigned char dynamic_shared[];

struct LaunchShape {
  dim3 blocks, threads;
  std::size_t shared_bytes = 0;
};

// Of the current device; the driver keeps the number, so asking costs less than a launch notices. Where it cannot be
// had the launch that follows says why.
inline std::int64_t multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

// A wave or two of blocks of kThreads. Kernels whose results do not depend on the grid launch at most so many and
// stride over the rest.
inline std::int64_t full_grid() { return 16 * multiprocessors(); }

inline unsigned blocks_for(std::int64_t items, std::int64_t items_per_block) {
  return static_cast<unsigned>(std::min(full_grid(), (items + items_per_block - 1) / items_per_block));
}

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

// Launches one after the other, until one is refused.
template <class... Launches>
cudaError_t launch_in_turn(Launches... launches) {
  cudaError_t status = cudaSuccess;
  static_cast<void>((((status = launches()) == cudaSuccess) && ...));
  return status;
}

// Several tensors in one launch: which of them owns `item`, when tensor t owns the items [first[t], first[t + 1]).
template <class Item>
__device__ __forceinline__ int owner_of(std::int64_t item, const Item* first, int tensors) {
  int low = 0, high = tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace qsim::cuda
