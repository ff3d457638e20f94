// The in-place variants while a graph is captured.
#include <torch/library.h>

#include <optional>
#include <string_view>

#include "functionalize.h"
#include "operator_named.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor& fake_quantize_out_functionalize(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                        std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                        std::string_view rounding, double grad_factor, Tensor& out) {
  using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis, Axis,
                         std::string_view, double);
  static const auto call = operator_named<Forward>("qsim::fake_quantize");
  const Tensor values = unwrapped(x), scales = unwrapped(scale), zero_points = unwrapped(zero_point);
  return write_through(out, [&] {
    return call.call(values, scales, zero_points, quant_min, quant_max, axis, block_size, rounding, grad_factor);
  });
}

Tensor& fake_quantize_inplace_functionalize(Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                            std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                            std::string_view rounding, double grad_factor) {
  return fake_quantize_out_functionalize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding,
                                         grad_factor, x);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Functionalize, m) {
  m.impl("fake_quantize.out", fake_quantize_out_functionalize);
  m.impl("fake_quantize_", fake_quantize_inplace_functionalize);
}
}  // namespace qsim
