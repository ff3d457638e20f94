#include "clip_grad.h"

#include <torch/library.h>

namespace qsim {
namespace {

std::tuple<at::Tensor, at::Tensor> grad_power_sum_meta(at::TensorList grads, double norm_type) {
  check_grads(grads, norm_type);
  return empty_sums(grads);
}

at::Tensor scale_grad_meta(at::TensorList grads, const at::Tensor& powers, const at::Tensor& counts, double max_norm,
                           double norm_type, std::string_view nonfinite) {
  check_grads(grads, norm_type);
  check_scaling(grads, powers, counts, max_norm);
  policy_of(nonfinite);
  return empty_norm(grads);
}

std::tuple<at::Tensor, at::Tensor> clip_grad_meta(at::TensorList grads, double max_norm, double norm_type,
                                                  std::string_view nonfinite) {
  const auto [powers, counts] = grad_power_sum_meta(grads, norm_type);
  return {scale_grad_meta(grads, powers, counts, max_norm, norm_type, nonfinite), counts};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("grad_power_sum", grad_power_sum_meta);
  m.impl("scale_grad_", scale_grad_meta);
  m.impl("clip_grad_", clip_grad_meta);
}
}  // namespace qsim
