// What the CPU, CUDA and Meta kernels of the gradient clipping operators check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "element.h"
#include "memory.h"
#include "qsim/clip_grad.h"

namespace qsim {

inline void check_grads(at::TensorList grads, double norm_type) {
  TORCH_CHECK_VALUE(norm_type > 0, "qsim: norm_type is ", norm_type, "; expected a number above 0, or inf");
  TORCH_CHECK_VALUE(!grads.empty(), "qsim: got no gradients; expected at least one");
  for (const at::Tensor& grad : grads) {
    element_of(grad);
    TORCH_CHECK_VALUE(grad.device() == grads[0].device(), "qsim: gradients are on ", grads[0].device(), " and ",
                      grad.device(), "; pass those of one device (qsim.clip_grad_norm_ groups them)");
  }
}

inline NonFinitePolicy policy_of(std::string_view name) {
  if (name == "skip") return NonFinitePolicy::skip;
  if (name == "zero") return NonFinitePolicy::zero;
  if (name == "raise") return NonFinitePolicy::raise;
  TORCH_CHECK_VALUE(false, "qsim: nonfinite is '", name, "'; expected 'skip', 'zero' or 'raise'");
}

// No element is scaled twice: a gradient may be a view, but not one of what another holds. Sorted by where they begin,
// those that overlap are neighbours; bytes are compared only where neighbours have gaps, as columns of one matrix.
inline void check_scaled_once(at::TensorList grads) {
  std::vector<std::pair<Extent, const at::Tensor*>> sorted;
  sorted.reserve(grads.size());
  for (const at::Tensor& grad : grads) sorted.emplace_back(extent_of(grad), &grad);
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  for (std::size_t first = 0, last; first < sorted.size(); first = last) {
    Extent all = sorted[first].first;
    bool dense = sorted[first].second->is_non_overlapping_and_dense(), apart = true;
    for (last = first + 1; last < sorted.size() && sorted[last].first.begin < all.end; ++last) {
      const bool next = sorted[last].second->is_non_overlapping_and_dense();
      apart = apart && !(dense && next);
      dense = dense && next;
      all.end = std::max(all.end, sorted[last].first.end);
    }
    if (last == first + 1 && dense) continue;
    if (apart) {
      std::vector<bool> seen(all.end - all.begin);
      for (std::size_t i = first; i < last; ++i) {
        for_each_byte(*sorted[i].second, [&](std::uintptr_t byte) {
          apart = apart && !seen[byte - all.begin];
          seen[byte - all.begin] = true;
        });
      }
    }
    TORCH_CHECK_VALUE(apart, "qsim: gradients share memory, those of shape ", sorted[first].second->sizes(), " and ",
                      sorted[last - 1].second->sizes(), " among them; pass each once, and clones of overlapping views");
  }
}

inline void check_scaling(at::TensorList grads, const at::Tensor& powers, const at::Tensor& counts, double max_norm) {
  TORCH_CHECK_VALUE(max_norm >= 0, "qsim: max_norm is ", max_norm, "; expected 0 or more");
  TORCH_CHECK_TYPE(powers.scalar_type() == at::kDouble && counts.scalar_type() == at::kLong, "qsim: powers are ",
                   described(powers.scalar_type()), " and counts ", described(counts.scalar_type()),
                   "; expected Double and Long");
  TORCH_CHECK_VALUE(powers.sizes() == counts.sizes() && powers.is_contiguous() && counts.is_contiguous(),
                    "qsim: powers have shape ", powers.sizes(), " and counts ", counts.sizes(),
                    "; expected contiguous tensors of one shape");
  TORCH_CHECK_VALUE(powers.device() == grads[0].device() && counts.device() == grads[0].device(),
                    "qsim: powers are on ", powers.device(), " and counts on ", counts.device(), "; expected ",
                    grads[0].device(), ", where the gradients are");
  check_scaled_once(grads);
}

// Power and count of each gradient.
inline std::tuple<at::Tensor, at::Tensor> empty_sums(at::TensorList grads) {
  const auto n = static_cast<std::int64_t>(grads.size());
  const auto options = grads[0].options();
  return {at::empty({n}, options.dtype(at::kDouble)), at::empty({n}, options.dtype(at::kLong))};
}

inline at::Tensor empty_norm(at::TensorList grads) {
  at::ScalarType dtype = at::kFloat;
  for (const at::Tensor& grad : grads) {
    if (grad.scalar_type() == at::kDouble) dtype = at::kDouble;
  }
  return at::empty({}, grads[0].options().dtype(dtype));
}

}  // namespace qsim
