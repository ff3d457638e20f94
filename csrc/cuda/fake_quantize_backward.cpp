#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>

#include "fake_quantize_call.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor mask_backward_cuda(const Tensor& grad, const Tensor& mask, at::OptionalIntArrayRef strides) {
  check_mask(grad, mask, strides);
  const c10::cuda::CUDAGuard guard(grad.device());
  const Tensor from = strides ? with_strides(grad, *strides) : dense(grad), bits = mask.contiguous();
  const Tensor dx = at::empty_like(from);
  check_launch(cuda::keep_where_set(from.const_data_ptr(), bits.const_data_ptr<std::uint8_t>(), dx.mutable_data_ptr(),
                                    grad.numel(), static_cast<int>(grad.element_size()), current_stream()));
  return dx;
}

Tensor backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                     std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                     std::string_view rounding) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_grad(grad, x);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor from = dense(x), gradient = with_strides(grad, from.strides()), dx = at::empty_like(from);
  if (x.numel() == 0) return dx;
  const CudaCall call(from, scale, zero_point, options);
  check_launch(cuda::fake_quantize_backward(call.call, gradient.const_data_ptr(), from.const_data_ptr(),
                                            dx.mutable_data_ptr(), current_stream()));
  return dx;
}

std::tuple<Tensor, Tensor, Tensor> learnable_backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                           const Tensor& zero_point, std::int64_t quant_min,
                                                           std::int64_t quant_max, Axis axis, Axis block_size,
                                                           std::string_view rounding, double grad_factor) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_grad(grad, x);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor from = dense(x), gradient = with_strides(grad, from.strides()), dx = at::empty_like(from);
  if (x.numel() == 0) return {dx, at::zeros_like(scale), at::zeros_like(scale)};
  const CudaCall call(from, scale, zero_point, options);
  const Tensor dscale = at::empty_like(call.scale), dzero_point = at::empty_like(call.scale);
  const Tensor partial =
      at::empty({cuda::learnable_partial_sums(call.call, call.scale.numel())}, call.scale.options().dtype(at::kDouble));
  check_launch(cuda::fake_quantize_learnable_backward(call.call, gradient.const_data_ptr(), from.const_data_ptr(),
                                                      dx.mutable_data_ptr(), call.scale.numel(), grad_factor,
                                                      partial.mutable_data_ptr<double>(), dscale.mutable_data_ptr(),
                                                      dzero_point.mutable_data_ptr(), current_stream()));
  if (!zero_point.is_floating_point()) dzero_point.zero_();  // integers are not learned
  return {dx, from_memory_order(dscale, from, options), from_memory_order(dzero_point, from, options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("fake_quantize_mask_backward", mask_backward_cuda);
  m.impl("fake_quantize_backward", backward_cuda);
  m.impl("fake_quantize_learnable_backward", learnable_backward_cuda);
}
}  // namespace qsim
