#include "fake_quantize.h"

#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <tuple>

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor fake_quantize_meta(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                          std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double) {
  check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  return at::empty_like(x);
}

Tensor& fake_quantize_out_meta(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                               std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double,
                               Tensor& out) {
  check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_out("qsim::fake_quantize", x, out);
  return out;
}

Tensor& fake_quantize_inplace_meta(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                                   std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding,
                                   double) {
  check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  return x;
}

std::tuple<Tensor, Tensor> with_mask_meta(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                          std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                          std::string_view rounding) {
  check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  return {at::empty_like(x), empty_mask(x)};
}

Tensor with_mask_inplace_meta(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                              std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding) {
  check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  return empty_mask(x);
}

Tensor mask_backward_meta(const Tensor& grad, const Tensor& mask, at::OptionalSymIntArrayRef strides) {
  check_mask(grad, mask, strides);
  return strides ? at::empty_strided_symint(grad.sym_sizes(), *strides, grad.options()) : at::empty_like(grad);
}

Tensor backward_meta(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                     std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                     std::string_view rounding) {
  check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_grad(grad, x);
  return at::empty_like(x);
}

std::tuple<Tensor, Tensor, Tensor> learnable_backward_meta(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                           const Tensor& zero_point, std::int64_t quant_min,
                                                           std::int64_t quant_max, Axis axis, Axis block_size,
                                                           std::string_view rounding, double) {
  check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_grad(grad, x);
  return {at::empty_like(x), empty_parameter_grad(scale), empty_parameter_grad(scale)};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("fake_quantize", fake_quantize_meta);
  m.impl("fake_quantize.out", fake_quantize_out_meta);
  m.impl("fake_quantize_", fake_quantize_inplace_meta);
  m.impl("fake_quantize_with_mask", with_mask_meta);
  m.impl("fake_quantize_with_mask_", with_mask_inplace_meta);
  m.impl("fake_quantize_mask_backward", mask_backward_meta);
  m.impl("fake_quantize_backward", backward_meta);
  m.impl("fake_quantize_learnable_backward", learnable_backward_meta);
}
}  // namespace qsim
