// What the CPU, CUDA and Meta kernels of fake_quantize_bias check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>

#include <tuple>

#include "described.h"
#include "element.h"
#include "fake_quantize.h"

namespace qsim {

inline void check_fake_quantize_bias(const at::Tensor& bias, const at::Tensor& input_scale,
                                     const at::Tensor& weight_scale) {
  constexpr const char* op = "qsim::fake_quantize_bias";
  TORCH_CHECK_TYPE(is_element(bias.scalar_type()), op, ": bias is ", described(bias.scalar_type()),
                   "; expected float16, bfloat16, float32 or float64");
  TORCH_CHECK_TYPE(input_scale.scalar_type() == at::kFloat && weight_scale.scalar_type() == at::kFloat, op,
                   ": input_scale is ", described(input_scale.scalar_type()), " and weight_scale ",
                   described(weight_scale.scalar_type()), "; expected Float for both");
  TORCH_CHECK_VALUE(input_scale.device() == bias.device() && weight_scale.device() == bias.device(), op,
                    ": bias is on ", bias.device(), ", input_scale on ", input_scale.device(), " and weight_scale on ",
                    weight_scale.device(), "; expected one device");
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_numel() <= INT32_MAX, op, ": bias has shape ", bias.sym_sizes(),
                    "; expected one axis, shorter than 2^31");
  TORCH_CHECK_VALUE(input_scale.sym_numel() == 1, op, ": input_scale has shape ", input_scale.sym_sizes(),
                    "; expected one element");
  const c10::SymInt channels = bias.sym_numel(), scales = weight_scale.sym_numel();
  TORCH_CHECK_VALUE(scales == channels || (scales > 0 && channels % scales == 0), op, ": weight_scale has shape ",
                    weight_scale.sym_sizes(), "; expected one element, or a number that ", channels,
                    ", the elements of bias, is a multiple of");
}

inline at::Tensor empty_bias(const at::Tensor& bias) {
  return at::empty_like(bias, bias.options(), at::MemoryFormat::Contiguous);
}

// run(bias, input_scale, weight_scale, y, mask) with everything contiguous and an undefined mask where none is wanted.
template <class Run>
std::tuple<at::Tensor, at::Tensor> quantized_bias(const at::Tensor& bias, const at::Tensor& input_scale,
                                                  const at::Tensor& weight_scale, bool with_mask, Run run) {
  check_fake_quantize_bias(bias, input_scale, weight_scale);
  const at::Tensor y = empty_bias(bias), mask = with_mask ? empty_mask(bias) : at::Tensor();
  if (bias.numel() > 0) run(bias.contiguous(), input_scale.contiguous(), weight_scale.contiguous(), y, mask);
  return {y, mask};
}

}  // namespace qsim
