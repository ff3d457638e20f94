// A step of rounding that is learned, and the errors behind it, a thread to a number.
#include "qsim/cuda/soft_round.h"

#include "launch.cuh"

namespace qsim::cuda {

namespace {

__global__ void __launch_bounds__(kThreads)
    soft_round_all(std::int64_t n, const __grid_constant__ SoftRow rows, const __grid_constant__ SoftRounding how) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::int64_t i = first; i < n; i += std::int64_t{gridDim.x} * kThreads) {
    qsim::soft_round(rows, i, rows.stride == 0 ? i / rows.columns : i, how);
  }
}

}  // namespace

cudaError_t soft_round(std::int64_t rows, const SoftRow& first, const SoftRounding& how, cudaStream_t stream) {
  const std::int64_t n = rows * first.columns;
  if (n == 0) return cudaSuccess;
  return launch(soft_round_all, {blocks_for(n, kThreads), kThreads}, stream, n, first, how);
}

}  // namespace qsim::cuda
