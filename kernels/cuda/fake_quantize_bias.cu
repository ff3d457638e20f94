// Biases on int32 grids, in one launch: they are few, and on a GPU it is launches that cost. A thread has the eight
// elements of a byte of the mask.
#include "qsim/fake_quantize_bias.h"

#include "elements.cuh"
#include "qsim/cuda/fake_quantize_bias.h"

namespace qsim::cuda {

namespace {

constexpr unsigned kPerThread = 8, kBlock = 64;

__device__ void store(double value, double& to) { to = value; }
template <class T>
__device__ void store(double value, T& to) {
  round_to(static_cast<float>(value), to);
}

template <class T>
__global__ void quantize_biases(const T* bias, unsigned n, const float* input_scale, const float* weight_scale,
                                unsigned scales, T* y, std::uint8_t* mask) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned first = thread * kPerThread, last = min(first + kPerThread, n);
  unsigned bits = 0;
  for (unsigned i = first; i < last; ++i) {
    const QuantizedBias quantized = qsim::fake_quantize_bias(widened(bias[i]), *input_scale, weight_scale[i % scales]);
    store(quantized.value, y[i]);
    bits |= static_cast<unsigned>(quantized.in_range) << (i - first);
  }
  if (mask != nullptr && first < n) mask[thread] = static_cast<std::uint8_t>(bits);
}

}  // namespace

cudaError_t fake_quantize_bias(const void* bias, Element element, int n, const float* input_scale,
                               const float* weight_scale, int scales, void* y, std::uint8_t* mask,
                               cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  constexpr unsigned kOfBlock = kPerThread * kBlock;
  const LaunchShape shape{(static_cast<unsigned>(n) - 1) / kOfBlock + 1, kBlock};
  return with_element(element, [&](auto zero) {
    using T = decltype(zero);
    return launch(quantize_biases<T>, shape, stream, static_cast<const T*>(bias), static_cast<unsigned>(n), input_scale,
                  weight_scale, static_cast<unsigned>(scales), static_cast<T*>(y), mask);
  });
}

}  // namespace qsim::cuda
