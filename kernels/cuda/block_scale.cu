// Scales of blocks from their ranges, a thread for each. Where they depend on the largest magnitude of all, it is found
// first.
#include "qsim/cuda/block_scale.h"

#include "launch.cuh"
#include "range_state.cuh"

namespace qsim::cuda {

namespace {

template <class F>
__device__ __forceinline__ void for_each_range(std::int64_t n, F f) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += threads) f(i);
}

__global__ void clear(float* magnitude) { *magnitude = 0; }

// A range that is not finite has no scale, and no say in those of others.
__global__ void __launch_bounds__(kThreads)
    magnitude_of_all(const float* low, const float* high, std::int64_t n, float* magnitude) {
  float mine = 0;
  for_each_range(n, [&](std::int64_t i) {
    const float of_range = -low[i] > high[i] ? -low[i] : high[i];
    if (low[i] <= high[i] && is_finite(of_range) && of_range > mine) mine = of_range;
  });
  mine = reduce_warp(mine, [](float a, float b) { return b > a ? b : a; });
  if (threadIdx.x % 32 == 0 && mine > 0) atomic_max(magnitude, mine);
}

__global__ void __launch_bounds__(kThreads)
    scale_of_each(const float* low, const float* high, std::int64_t n, const __grid_constant__ BlockScaleRule rule,
                  const float* magnitude, float* scale) {
  const float of_tensor = rule.format == ScaleFormat::e4m3 ? scale_of_tensor(*magnitude, rule) : 1;
  for_each_range(n, [&](std::int64_t i) { scale[i] = qsim::block_scale({low[i], high[i]}, rule, of_tensor); });
}

}  // namespace

cudaError_t block_scale(const float* low, const float* high, std::int64_t n, const BlockScaleRule& rule,
                        float* magnitude, float* scale, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const LaunchShape shape{blocks_for(n, kThreads), kThreads};
  if (rule.format == ScaleFormat::e4m3) {
    const cudaError_t cleared = launch(clear, {1, 1}, stream, magnitude);
    if (cleared != cudaSuccess) return cleared;
    const cudaError_t found = launch(magnitude_of_all, shape, stream, low, high, n, magnitude);
    if (found != cudaSuccess) return found;
  }
  return launch(scale_of_each, shape, stream, low, high, n, rule, magnitude, scale);
}

}  // namespace qsim::cuda
