#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include <tuple>

#include "fake_quantize_call.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

// x and y are dense with equal strides; y may be x. mask: undefined, or that of x in memory order.
void run_forward(const Tensor& x, const Tensor& y, const Tensor& mask, const Tensor& scale, const Tensor& zero_point,
                 const FakeQuantizeOptions& options) {
  if (x.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  const CudaCall call(x, scale, zero_point, options);
  auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
  check_launch(cuda::fake_quantize(call.call, x.const_data_ptr(), y.mutable_data_ptr(), bits, current_stream()));
}

Tensor fresh(const Tensor& x, const Tensor& mask, const Tensor& scale, const Tensor& zero_point,
             const FakeQuantizeOptions& options) {
  const Tensor y = at::empty_like(x);
  if (!x.is_non_overlapping_and_dense()) y.copy_(x);
  run_forward(x.is_non_overlapping_and_dense() ? x : y, y, mask, scale, zero_point, options);
  return y;
}

void into(const Tensor& x, const Tensor& out, const Tensor& mask, const Tensor& scale, const Tensor& zero_point,
          const FakeQuantizeOptions& options) {
  at::assert_no_internal_overlap(out);
  at::assert_no_partial_overlap(out, x);
  if (x.is_non_overlapping_and_dense() && out.strides() == x.strides()) {
    run_forward(x, out, mask, scale, zero_point, options);
  } else {
    out.copy_(fresh(x, mask, scale, zero_point, options));
  }
}

Tensor fake_quantize_cuda(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                          std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  return fresh(x, Tensor(), scale, zero_point, options);
}

Tensor& fake_quantize_out_cuda(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                               std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double,
                               Tensor& out) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_out(x, out);
  into(x, out, Tensor(), scale, zero_point, options);
  return out;
}

Tensor& fake_quantize_inplace_cuda(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                                   std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding,
                                   double grad_factor) {
  return fake_quantize_out_cuda(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, grad_factor, x);
}

std::tuple<Tensor, Tensor> with_mask_cuda(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                          std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                          std::string_view rounding) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  const Tensor mask = empty_mask(x);
  return {fresh(x, mask, scale, zero_point, options), mask};
}

Tensor with_mask_inplace_cuda(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                              std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  const Tensor mask = empty_mask(x);
  into(x, x, mask, scale, zero_point, options);
  return mask;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("fake_quantize", fake_quantize_cuda);
  m.impl("fake_quantize.out", fake_quantize_out_cuda);
  m.impl("fake_quantize_", fake_quantize_inplace_cuda);
  m.impl("fake_quantize_with_mask", with_mask_cuda);
  m.impl("fake_quantize_with_mask_", with_mask_inplace_cuda);
}
}  // namespace qsim
