// CUDA entry points of fake_quantize: device pointers, stream-ordered, no synchronisation, no allocation, capturable.
// Elements are taken in memory order, as Layout describes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/fake_quantize.h"
#include "qsim/finite_range.h"

namespace qsim::cuda {

// One scale and zero point per parameter: float32, or float64 for elements of float64. A learned zero point has the
// type of the scale, any other is int32.
struct GridSource {
  const void* scale;
  const void* zero_point;
  bool learned;
  double quant_min, quant_max;
};

struct FakeQuantizeCall {
  Element element;
  std::int64_t n;
  GridSource grids;
  Layout layout;
  Rounding rounding;
  const std::uint8_t* enabled = nullptr;  // a switch on the device for the forward; off: a copy, all of it in range
};

// y may be x. mask: one bit per element, (n + 7) / 8 bytes, or null.
cudaError_t fake_quantize(const FakeQuantizeCall& call, const void* x, void* y, std::uint8_t* mask,
                          cudaStream_t stream);

// dx = grad where the bit is set, +0.0 elsewhere; element_size is 2, 4 or 8.
cudaError_t keep_where_set(const void* grad, const std::uint8_t* mask, void* dx, std::int64_t n, int element_size,
                           cudaStream_t stream);

cudaError_t fake_quantize_backward(const FakeQuantizeCall& call, const void* grad, const void* x, void* dx,
                                   cudaStream_t stream);

// Numbers in `partial` below: what a call for n_parameters parameters works in.
std::int64_t learnable_partial_sums(const FakeQuantizeCall& call, std::int64_t n_parameters);

// dx, and the gradients of the n_parameters scales and zero points in their type. `partial`: whatever it holds before.
cudaError_t fake_quantize_learnable_backward(const FakeQuantizeCall& call, const void* grad, const void* x, void* dx,
                                             std::int64_t n_parameters, double grad_factor, double* partial,
                                             void* dscale, void* dzero_point, cudaStream_t stream);

}  // namespace qsim::cuda
