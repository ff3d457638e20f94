// From tensors to the raw memory that kernels take.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "qsim/finite_range.h"

namespace qsim {

inline Element element_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return Element::f32;
    case at::kHalf:
      return Element::f16;
    case at::kBFloat16:
      return Element::bf16;
    case at::kDouble:
      return Element::f64;
    default:
      TORCH_CHECK_TYPE(false, "qsim: got a tensor of ", x.scalar_type(),
                       "; expected float32, float16, bfloat16 or float64");
  }
}

// x itself when its memory has neither gaps nor overlap, in whatever order of axes, else a contiguous copy.
inline at::Tensor dense(const at::Tensor& x) {
  return x.is_contiguous() || x.is_non_overlapping_and_dense() ? x : x.contiguous();
}

}  // namespace qsim
