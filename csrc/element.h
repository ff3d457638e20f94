// From tensors to the raw memory that kernels take.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

#include "described.h"
#include "qsim/finite_range.h"

namespace qsim {

inline bool is_element(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

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
      TORCH_CHECK_TYPE(false, "qsim: got a tensor of ", described(x.scalar_type()),
                       "; expected float32, float16, bfloat16 or float64");
  }
}

inline std::int64_t wrapped_axis(const at::Tensor& x, std::int64_t axis) {
  TORCH_CHECK_INDEX(axis >= -x.dim() && axis < x.dim(), "qsim: axis ", axis, " of x with ", x.dim(),
                    " dimensions; expected ", -x.dim(), " .. ", x.dim() - 1);
  return axis < 0 ? axis + x.dim() : axis;
}

// Blocks of `size` elements in a dimension of `length`, the last one short. Dimensions are shorter than half of what an
// integer counts to: to longer blocks it makes no difference, and the sum does not overflow.
template <class Length>
Length blocks_in(const Length& length, std::int64_t size) {
  size = std::min(size, INT64_MAX / 2);
  return (length + (size - 1)) / size;
}

// x itself when its elements fill memory without gaps or overlaps, in whatever order; otherwise a copy that does.
inline at::Tensor dense(const at::Tensor& x) {
  return x.is_non_overlapping_and_dense() ? x : at::empty_like(x).copy_(x);
}

}  // namespace qsim
