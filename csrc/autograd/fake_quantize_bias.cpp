// The straight-through gradient of fake_quantize_bias: it passes where the integer did not have to be clamped, as one
// bit per element remembers. Scales are those of other tensors and get none here.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "autograd/mask_layout.h"
#include "autograd/nodes.h"
#include "operator_named.h"

namespace qsim {
namespace {

using at::Tensor;

using BiasForward = Tensor(const Tensor&, const Tensor&, const Tensor&);
using BiasWithMask = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&);

Tensor fake_quantize_bias_autograd(c10::DispatchKeySet keys, const Tensor& bias, const Tensor& input_scale,
                                   const Tensor& weight_scale) {
  constexpr const char* name = "qsim::fake_quantize_bias";
  TORCH_CHECK(!is_differentiated(name, input_scale) && !is_differentiated(name, weight_scale), name,
              ": a scale requires grad, but it has no gradient here; pass its detach()");
  if (!is_differentiated(name, bias)) {
    static const auto call = operator_named<BiasForward>(name);
    const at::AutoDispatchBelowAutograd guard;
    return call.redispatch(keys & c10::after_autograd_keyset, bias, input_scale, weight_scale);
  }
  static const auto call = operator_named<BiasWithMask>("qsim::fake_quantize_bias_with_mask");
  auto [y, mask] = [&] {
    const at::AutoDispatchBelowAutograd guard;
    return call.call(bias, input_scale, weight_scale);
  }();
  const auto node = mask_node("FakeQuantizeBiasBackward", edges_of(bias), mask, mask_strides(y));
  return with_history(std::move(y), node);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("fake_quantize_bias", fake_quantize_bias_autograd);
  m.impl("fake_quantize_bias_with_mask", torch::autograd::autogradNotImplementedFallback());
}
}  // namespace qsim
