#include "fake_quantize_bias.h"

#include <torch/library.h>

namespace qsim {
namespace {

using at::Tensor;

Tensor bias_meta(const Tensor& bias, const Tensor& input_scale, const Tensor& weight_scale) {
  check_fake_quantize_bias(bias, input_scale, weight_scale);
  return empty_bias(bias);
}

std::tuple<Tensor, Tensor> bias_with_mask_meta(const Tensor& bias, const Tensor& input_scale,
                                               const Tensor& weight_scale) {
  check_fake_quantize_bias(bias, input_scale, weight_scale);
  return {empty_bias(bias), empty_mask(bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("fake_quantize_bias", bias_meta);
  m.impl("fake_quantize_bias_with_mask", bias_with_mask_meta);
}
}  // namespace qsim
