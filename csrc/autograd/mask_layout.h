// The bits of a mask are in the memory order of a dense tensor. Where x, quantized in place, is not dense, the kernels
// make them in the order of empty_like(x).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

namespace qsim {

inline at::Tensor mask_layout(const at::Tensor& x) { return x.is_non_overlapping_and_dense() ? x : at::empty_like(x); }

}  // namespace qsim
