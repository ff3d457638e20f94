// The in-place variants while a graph is captured: torch.compile turns mutation into values, and does so by itself only
// for operators that do not return what they mutate.
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <optional>
#include <string_view>

namespace qsim {
namespace {

namespace functional = at::functionalization::impl;
using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor unwrapped(const Tensor& x) {
  if (!functional::isFunctionalTensor(x)) return x;
  functional::sync(x);
  return functional::from_functional_tensor(x);
}

Tensor& fake_quantize_out_functionalize(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                        std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                        std::string_view rounding, double grad_factor, Tensor& out) {
  using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis, Axis,
                         std::string_view, double);
  static const auto call = c10::Dispatcher::singleton().findSchemaOrThrow("qsim::fake_quantize", "").typed<Forward>();
  TORCH_CHECK(functional::isFunctionalTensor(out),
              "qsim::fake_quantize: cannot trace a mutation of a tensor that is not part of the graph");
  Tensor y;
  {
    const at::AutoDispatchSkipFunctionalize guard;
    y = call.call(unwrapped(x), unwrapped(scale), unwrapped(zero_point), quant_min, quant_max, axis, block_size,
                  rounding, grad_factor);
  }
  functional::replace_(out, y);
  functional::commit_update(out);
  functional::sync(out);
  return out;
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
