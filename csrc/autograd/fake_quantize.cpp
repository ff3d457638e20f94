// The straight-through gradient of fake_quantize. What is saved depends on what needs a gradient:
//   scale or zero_point    x (and they): dx, d scale and d zero_point come from one pass
//   x, a leaf              x, which lives anyway: the range is computed again
//   x, in torch.func       x: there a tensor may stand for many, of which each would have a mask
//   x, an activation       one bit per element
// Without a gradient nothing is saved and the kernel runs directly.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>
#include <utility>

#include "autograd/mask_layout.h"
#include "autograd/nodes.h"
#include "autograd/version.h"
#include "operator_named.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis, Axis,
                       std::string_view, double);
using ForwardOut = Tensor&(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis, Axis,
                           std::string_view, double, Tensor&);
using ForwardInPlace = Tensor&(Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis, Axis,
                               std::string_view, double);
using WithMask = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t,
                                            Axis, Axis, std::string_view);
using WithMaskInPlace = Tensor(Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis, Axis,
                               std::string_view);
using MaskBackward = Tensor(const Tensor&, const Tensor&, at::OptionalSymIntArrayRef);
using Backward = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis,
                        Axis, std::string_view);

constexpr const char* kName = "FakeQuantizeBackward";

Tensor forward(const Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = operator_named<Forward>("qsim::fake_quantize");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding, o.grad_factor);
}

Tensor& forward_(Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = operator_named<ForwardInPlace>("qsim::fake_quantize_");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding, o.grad_factor);
}

std::tuple<Tensor, Tensor> with_mask(const Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = operator_named<WithMask>("qsim::fake_quantize_with_mask");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding);
}

Tensor with_mask_(Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = operator_named<WithMaskInPlace>("qsim::fake_quantize_with_mask_");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding);
}

bool is_learned(const Tensor& scale, const Tensor& zero_point) {
  return scale.requires_grad() || zero_point.requires_grad();
}

Tensor with_graph(const Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& options) {
  const bool learned = is_learned(scale, zero_point);
  if (learned || x.is_leaf() || is_transformed(x)) {
    Tensor y = [&] {
      const at::AutoDispatchBelowAutograd guard;
      return forward(x, scale, zero_point, options);
    }();
    return with_history(std::move(y),
                        learned ? learnable_node(kName, edges_of(x, scale, zero_point), x, scale, zero_point, options)
                                : elements_node(kName, edges_of(x), x, scale, zero_point, options));
  }
  auto [y, mask] = [&] {
    const at::AutoDispatchBelowAutograd guard;
    return with_mask(x, scale, zero_point, options);
  }();
  const auto node = mask_node(kName, edges_of(x), mask, mask_strides(y));
  return with_history(std::move(y), node);
}

// In place, x is gone after the call: a learned scale keeps a copy of it.
void with_graph_(Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& options) {
  refuse_transformed("qsim::fake_quantize_", x);
  torch::autograd::check_inplace(x, true);
  if (is_learned(scale, zero_point)) {
    edge_list edges = edges_of(x, scale, zero_point);
    const Tensor before = [&] {
      const at::AutoDispatchBelowAutograd guard;
      Tensor copy = x.clone();
      forward_(x, scale, zero_point, options);
      return copy;
    }();
    with_history_(x, learnable_node(kName, std::move(edges), before, scale, zero_point, options));
    return;
  }
  edge_list edges = edges_of(x);
  const auto [mask, layout] = [&] {
    const at::AutoDispatchBelowAutograd guard;
    Tensor bits = with_mask_(x, scale, zero_point, options);
    return std::pair(std::move(bits), mask_layout(x));
  }();
  with_history_(x, mask_node(kName, std::move(edges), mask, mask_strides(layout)));
}

bool any_differentiated(const Tensor& x, const Tensor& scale, const Tensor& zero_point) {
  constexpr const char* name = "qsim::fake_quantize";
  const bool of_x = is_differentiated(name, x), of_scale = is_differentiated(name, scale);
  return is_differentiated(name, zero_point) || of_x || of_scale;
}

Tensor fake_quantize_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                              std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                              std::string_view rounding, double grad_factor) {
  if (any_differentiated(x, scale, zero_point)) {
    return with_graph(x, scale, zero_point,
                      {quant_min, quant_max, axis, block_size, std::string(rounding), grad_factor});
  }
  static const auto call = operator_named<Forward>("qsim::fake_quantize");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                         block_size, rounding, grad_factor);
}

Tensor& fake_quantize_inplace_autograd(c10::DispatchKeySet keys, Tensor& x, const Tensor& scale,
                                       const Tensor& zero_point, std::int64_t quant_min, std::int64_t quant_max,
                                       Axis axis, Axis block_size, std::string_view rounding, double grad_factor) {
  if (any_differentiated(x, scale, zero_point)) {
    with_graph_(x, scale, zero_point, {quant_min, quant_max, axis, block_size, std::string(rounding), grad_factor});
    return x;
  }
  static const auto call = operator_named<ForwardInPlace>("qsim::fake_quantize_");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                         block_size, rounding, grad_factor);
}

Tensor& fake_quantize_out_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& scale,
                                   const Tensor& zero_point, std::int64_t quant_min, std::int64_t quant_max, Axis axis,
                                   Axis block_size, std::string_view rounding, double grad_factor, Tensor& out) {
  TORCH_CHECK(
      !any_differentiated(x, scale, zero_point) && !is_differentiated("qsim::fake_quantize", out),
      "qsim::fake_quantize: out= has no gradient, but one of the arguments requires grad; call it without out, or "
      "under torch.no_grad()");
  static const auto call = operator_named<ForwardOut>("qsim::fake_quantize", "out");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                         block_size, rounding, grad_factor, out);
}

// The gradients of an activation and of a weight are linear in grad: differentiable once more, by themselves.
Tensor mask_backward_autograd(c10::DispatchKeySet keys, const Tensor& grad, const Tensor& mask,
                              at::OptionalSymIntArrayRef strides) {
  const bool differentiated = is_differentiated("qsim::fake_quantize_mask_backward", grad);
  static const auto call = operator_named<MaskBackward>("qsim::fake_quantize_mask_backward");
  Tensor dx = [&] {
    const at::AutoDispatchBelowAutograd guard;
    return call.redispatch(keys & c10::after_autograd_keyset, grad, mask, strides);
  }();
  if (!differentiated) return dx;
  const auto node = mask_node("FakeQuantizeMaskBackwardBackward", edges_of(grad), mask, mask_strides(dx));
  return with_history(std::move(dx), node);
}

Tensor backward_autograd(c10::DispatchKeySet keys, const Tensor& grad, const Tensor& x, const Tensor& scale,
                         const Tensor& zero_point, std::int64_t quant_min, std::int64_t quant_max, Axis axis,
                         Axis block_size, std::string_view rounding) {
  const bool differentiated = is_differentiated("qsim::fake_quantize_backward", grad);
  static const auto call = operator_named<Backward>("qsim::fake_quantize_backward");
  Tensor dx = [&] {
    const at::AutoDispatchBelowAutograd guard;
    return call.redispatch(keys & c10::after_autograd_keyset, grad, x, scale, zero_point, quant_min, quant_max, axis,
                           block_size, rounding);
  }();
  if (!differentiated) return dx;
  return with_history(std::move(dx),
                      elements_node("FakeQuantizeBackwardBackward", edges_of(grad), x, scale, zero_point,
                                    {quant_min, quant_max, axis, block_size, std::string(rounding), 1.0}));
}

Tensor& fake_quantize_inplace_versioned(c10::DispatchKeySet keys, Tensor& x, const Tensor& scale,
                                        const Tensor& zero_point, std::int64_t quant_min, std::int64_t quant_max,
                                        Axis axis, Axis block_size, std::string_view rounding, double grad_factor) {
  static const auto call = operator_named<ForwardInPlace>("qsim::fake_quantize_");
  check_version(x);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call.redispatch(keys & c10::after_ADInplaceOrView_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                    block_size, rounding, grad_factor);
  }
  bump_version(x);
  return x;
}

Tensor with_mask_inplace_versioned(c10::DispatchKeySet keys, Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                   std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                   std::string_view rounding) {
  static const auto call = operator_named<WithMaskInPlace>("qsim::fake_quantize_with_mask_");
  check_version(x);
  Tensor mask = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call.redispatch(keys & c10::after_ADInplaceOrView_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                           block_size, rounding);
  }();
  bump_version(x);
  return mask;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("fake_quantize", fake_quantize_autograd);
  m.impl("fake_quantize.out", fake_quantize_out_autograd);
  m.impl("fake_quantize_", fake_quantize_inplace_autograd);
  m.impl("fake_quantize_mask_backward", mask_backward_autograd);
  m.impl("fake_quantize_backward", backward_autograd);
  m.impl("fake_quantize_with_mask", torch::autograd::autogradNotImplementedFallback());
  m.impl("fake_quantize_with_mask_", torch::autograd::autogradNotImplementedFallback());
  m.impl("fake_quantize_learnable_backward", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(qsim, ADInplaceOrView, m) {  // version counters, also in inference mode
  m.impl("fake_quantize.out", torch::CppFunction::makeFromBoxedFunction<&versioned>());
  m.impl("fake_quantize_", fake_quantize_inplace_versioned);
  m.impl("fake_quantize_with_mask_", with_mask_inplace_versioned);
}
}  // namespace qsim
