#include "fake_quantize_bias.h"

#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/fake_quantize_bias.h"

namespace qsim {
namespace {

using at::Tensor;

void launch_bias(const Tensor& bias, const Tensor& input_scale, const Tensor& weight_scale, const Tensor& y,
                 const Tensor& mask) {
  check_launch(cuda::fake_quantize_bias(
      bias.const_data_ptr(), element_of(bias), static_cast<int>(bias.numel()), input_scale.const_data_ptr<float>(),
      weight_scale.const_data_ptr<float>(), static_cast<int>(weight_scale.numel()), y.mutable_data_ptr(),
      mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr, current_stream()));
}

std::tuple<Tensor, Tensor> bias_with_mask_cuda(const Tensor& bias, const Tensor& input_scale,
                                               const Tensor& weight_scale) {
  const c10::cuda::CUDAGuard guard(bias.device());
  return quantized_bias(bias, input_scale, weight_scale, true, launch_bias);
}

Tensor bias_cuda(const Tensor& bias, const Tensor& input_scale, const Tensor& weight_scale) {
  const c10::cuda::CUDAGuard guard(bias.device());
  return std::get<0>(quantized_bias(bias, input_scale, weight_scale, false, launch_bias));
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("fake_quantize_bias", bias_cuda);
  m.impl("fake_quantize_bias_with_mask", bias_with_mask_cuda);
}
}  // namespace qsim
