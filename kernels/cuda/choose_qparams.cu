// Scales and zero points of ranges, a thread for each.
#include "qsim/choose_qparams.h"

#include "launch.cuh"
#include "qsim/cuda/choose_qparams.h"

namespace qsim::cuda {

namespace {

template <class T>
__global__ void run(const T* low, const T* high, int n, QuantGrid grid, double min_scale, T* scale,
                    std::int32_t* zero_point) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= static_cast<unsigned>(n)) return;
  const QuantParams<T> params = qsim::choose_qparams<T>(low[i], high[i], grid, min_scale);
  scale[i] = params.scale;
  zero_point[i] = params.zero_point;
}

}  // namespace

template <class T>
cudaError_t choose_qparams(const T* low, const T* high, int n, QuantGrid grid, double min_scale, T* scale,
                           std::int32_t* zero_point, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return launch(run<T>, {(static_cast<unsigned>(n) + kThreads - 1) / kThreads, kThreads}, stream, low, high, n, grid,
                min_scale, scale, zero_point);
}

template cudaError_t choose_qparams(const float*, const float*, int, QuantGrid, double, float*, std::int32_t*,
                                    cudaStream_t);
template cudaError_t choose_qparams(const double*, const double*, int, QuantGrid, double, double*, std::int32_t*,
                                    cudaStream_t);

}  // namespace qsim::cuda
