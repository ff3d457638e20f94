#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>

#include "autograd/version.h"
#include "operator_named.h"

namespace qsim {
namespace {

using Sums = std::tuple<at::Tensor, at::Tensor>;

// On every backend: one pass for norm and counts, one for scaling.
Sums clip_grad(at::TensorList grads, double max_norm, double norm_type, std::string_view nonfinite) {
  static const auto sum = operator_named<Sums(at::TensorList, double)>("qsim::grad_power_sum");
  static const auto scale = operator_named<at::Tensor(at::TensorList, const at::Tensor&, const at::Tensor&, double,
                                                      double, std::string_view)>("qsim::scale_grad_");
  const auto [powers, counts] = sum.call(grads, norm_type);
  return {scale.call(grads, powers, counts, max_norm, norm_type, nonfinite), counts};
}

void check_no_graph(at::TensorList grads) {
  for (const at::Tensor& grad : grads) {
    TORCH_CHECK(!(grad.requires_grad() && at::GradMode::is_enabled()),
                "qsim: clipping cannot be differentiated; call it under torch.no_grad()");
  }
}

Sums clip_grad_versioned(at::TensorList grads, double max_norm, double norm_type, std::string_view nonfinite) {
  static const auto op = operator_named<decltype(clip_grad_versioned)>("qsim::clip_grad_");
  check_no_graph(grads);
  check_versions(grads);
  const at::AutoDispatchBelowADInplaceOrView below;
  Sums sums = op.call(grads, max_norm, norm_type, nonfinite);
  bump_versions(grads);
  return sums;
}

at::Tensor scale_grad_versioned(at::TensorList grads, const at::Tensor& powers, const at::Tensor& counts,
                                double max_norm, double norm_type, std::string_view nonfinite) {
  static const auto op = operator_named<decltype(scale_grad_versioned)>("qsim::scale_grad_");
  check_no_graph(grads);
  check_versions(grads);
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor norm = op.call(grads, powers, counts, max_norm, norm_type, nonfinite);
  bump_versions(grads);
  return norm;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CompositeExplicitAutograd, m) { m.impl("clip_grad_", clip_grad); }
TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("grad_power_sum", torch::autograd::autogradNotImplementedFallback());
  m.impl("clip_grad_", torch::CppFunction::makeFallthrough());
  m.impl("scale_grad_", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(qsim, ADInplaceOrView, m) {
  m.impl("clip_grad_", clip_grad_versioned);
  m.impl("scale_grad_", scale_grad_versioned);
}
}  // namespace qsim
