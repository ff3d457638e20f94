// Straight-through, with the scale held fixed: the gradient is that of fake_quantize and round_to_format, which a call
// that needs one is made of. Without a gradient the kernel runs directly.
#include "dynamic.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace qsim {
namespace {

using at::Tensor;

bool wants_gradient(const Tensor& x) {
  return at::GradMode::is_enabled() && (x.requires_grad() || x._fw_grad(0).defined());
}

Tensor integers(const Tensor& x, std::int64_t quant_min, std::int64_t quant_max, OptionalInt axis,
                OptionalInt block_size, bool symmetric, std::string_view rounding, double min_scale,
                std::optional<std::string_view> scale_format, std::string_view scale_rounding) {
  if (wants_gradient(x)) {
    return compose(x, IntegerCall(x, quant_min, quant_max, axis, block_size, symmetric, rounding, min_scale,
                                  scale_format, scale_rounding));
  }
  static const auto op = operator_named<decltype(integers)>(IntegerCall::kOp);
  const at::AutoDispatchBelowAutograd guard;
  return op.call(x, quant_min, quant_max, axis, block_size, symmetric, rounding, min_scale, scale_format,
                 scale_rounding);
}

Tensor formats(const Tensor& x, std::string_view format, OptionalInt axis, OptionalInt block_size,
               std::optional<bool> saturate, double min_scale, std::optional<std::string_view> scale_format,
               std::string_view scale_rounding) {
  if (wants_gradient(x)) {
    return compose(x, FormatCall(x, format, axis, block_size, saturate, min_scale, scale_format, scale_rounding));
  }
  static const auto op = operator_named<decltype(formats)>(FormatCall::kOp);
  const at::AutoDispatchBelowAutograd guard;
  return op.call(x, format, axis, block_size, saturate, min_scale, scale_format, scale_rounding);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("choose_block_scale", torch::autograd::autogradNotImplementedFallback());
  m.impl("fake_quantize_dynamic", integers);
  m.impl("round_to_format_dynamic", formats);
}
}  // namespace qsim
