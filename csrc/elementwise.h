// Operators that compute every element from itself: kernels walk dense memory, and these bring any tensor to it.
// run(x, y) gets both dense with equal strides; y may be x.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace qsim {

// The result in y, which is new and laid out as empty_like lays out a tensor like x.
template <class Run>
at::Tensor fresh(const at::Tensor& x, const at::Tensor& y, Run run) {
  const bool dense = x.is_non_overlapping_and_dense();
  if (!dense) y.copy_(x);
  run(dense ? x : y, y);
  return y;
}

// The result in out, whatever its layout and wherever it lies in x, but no place twice; empty(x) makes what a detour
// needs.
template <class Empty, class Run>
void into(const at::Tensor& x, const at::Tensor& out, Empty empty, Run run) {
  const Extent from = extent_of(x), to = extent_of(out);
  const bool in_step = from.begin == to.begin || !from.meets(to);  // no element is written before it is read
  if (in_step && x.is_non_overlapping_and_dense() && out.strides() == x.strides()) {
    run(x, out);
  } else {
    out.copy_(fresh(x, empty(x), run));
  }
}

}  // namespace qsim
