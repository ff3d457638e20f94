// The straight-through gradient of fake_quantize. What is saved depends on what needs a gradient:
//   scale or zero_point    x (and they): dx, d scale and d zero_point come from one pass
//   x, a leaf              x, which lives anyway: the range is computed again
//   x, an activation       one bit per element
// Without a gradient nothing is saved and the kernel runs directly.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "autograd/mask_layout.h"
#include "autograd/version.h"

namespace qsim {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Axis = std::optional<std::int64_t>;

template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

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
using LearnableBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                             std::int64_t, std::int64_t, Axis, Axis, std::string_view,
                                                             double);

// The arguments that are no tensors.
struct Options {
  std::int64_t quant_min, quant_max;
  Axis axis, block_size;
  std::string rounding;
  double grad_factor;

  void save(AutogradContext* ctx) const {
    auto& saved = ctx->saved_data;
    saved["quant_min"] = quant_min;
    saved["quant_max"] = quant_max;
    saved["axis"] = axis;
    saved["block_size"] = block_size;
    saved["rounding"] = rounding;
    saved["grad_factor"] = grad_factor;
  }
  static Options saved(AutogradContext* ctx) {
    auto& saved = ctx->saved_data;
    return {saved["quant_min"].toInt(),
            saved["quant_max"].toInt(),
            saved["axis"].toOptional<std::int64_t>(),
            saved["block_size"].toOptional<std::int64_t>(),
            saved["rounding"].toStringRef(),
            saved["grad_factor"].toDouble()};
  }
};

Tensor forward(const Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = op<Forward>("qsim::fake_quantize");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding, o.grad_factor);
}

Tensor& forward_(Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = op<ForwardInPlace>("qsim::fake_quantize_");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding, o.grad_factor);
}

std::tuple<Tensor, Tensor> with_mask(const Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = op<WithMask>("qsim::fake_quantize_with_mask");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding);
}

Tensor with_mask_(Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = op<WithMaskInPlace>("qsim::fake_quantize_with_mask_");
  return call.call(x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding);
}

Tensor mask_backward(const Tensor& grad, const Tensor& mask, at::OptionalSymIntArrayRef strides) {
  static const auto call = op<MaskBackward>("qsim::fake_quantize_mask_backward");
  return call.call(grad, mask, strides);
}

Tensor backward(const Tensor& grad, const Tensor& x, const Tensor& scale, const Tensor& zero_point, const Options& o) {
  static const auto call = op<Backward>("qsim::fake_quantize_backward");
  return call.call(grad, x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding);
}

std::tuple<Tensor, Tensor, Tensor> learnable_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                                      const Tensor& zero_point, const Options& o) {
  static const auto call = op<LearnableBackward>("qsim::fake_quantize_learnable_backward");
  return call.call(grad, x, scale, zero_point, o.quant_min, o.quant_max, o.axis, o.block_size, o.rounding,
                   o.grad_factor);
}

enum Saved : std::int64_t { kMask, kElements, kElementsToLearn };

Saved what_to_save(const Tensor& x, const Tensor& scale, const Tensor& zero_point) {
  if (scale.requires_grad() || zero_point.requires_grad()) return kElementsToLearn;
  return x.is_leaf() ? kElements : kMask;
}

// y: laid out as the mask's bits are.
void save_mask(AutogradContext* ctx, const Tensor& mask, const Tensor& y) {
  ctx->saved_data["saved"] = static_cast<std::int64_t>(kMask);
  ctx->saved_data["strides"] = y.sym_strides();
  ctx->save_for_backward({mask});
}

void save_elements(AutogradContext* ctx, Saved saved, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                   const Options& options) {
  ctx->saved_data["saved"] = static_cast<std::int64_t>(saved);
  options.save(ctx);
  ctx->save_for_backward({x, scale, zero_point});
}

variable_list backward_of_saved(AutogradContext* ctx, const variable_list& grads) {
  const Tensor& grad = grads[0];
  if (!grad.defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
  const variable_list saved = ctx->get_saved_variables();
  const auto kind = static_cast<Saved>(ctx->saved_data["saved"].toInt());
  if (kind == kMask) {
    const auto strides = ctx->saved_data["strides"].toSymIntVector();
    return {mask_backward(grad, saved[0], at::SymIntArrayRef(strides)), Tensor(), Tensor(), Tensor()};
  }
  const Tensor &x = saved[0], &scale = saved[1], &zero_point = saved[2];
  const Options options = Options::saved(ctx);
  if (kind == kElements) return {backward(grad, x, scale, zero_point, options), Tensor(), Tensor(), Tensor()};
  const auto [dx, dscale, dzero_point] = learnable_backward(grad, x, scale, zero_point, options);
  return {dx, dscale, zero_point.is_floating_point() ? dzero_point : Tensor(), Tensor()};
}

class FakeQuantize : public torch::autograd::Function<FakeQuantize> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                        const Options& options) {
    const at::AutoDispatchBelowAutograd guard;
    ctx->set_materialize_grads(false);
    const Saved saved = what_to_save(x, scale, zero_point);
    if (saved == kMask) {
      auto [y, mask] = with_mask(x, scale, zero_point, options);
      save_mask(ctx, mask, y);
      return y;
    }
    save_elements(ctx, saved, x, scale, zero_point, options);
    return qsim::forward(x, scale, zero_point, options);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return backward_of_saved(ctx, grads);
  }
};

// In place, x is gone after the call: a learned scale keeps a copy of it.
class FakeQuantizeInPlace : public torch::autograd::Function<FakeQuantizeInPlace> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, Tensor x, const Tensor& scale, const Tensor& zero_point,
                        const Options& options) {
    const at::AutoDispatchBelowAutograd guard;
    ctx->set_materialize_grads(false);
    ctx->mark_dirty({x});
    if (what_to_save(x, scale, zero_point) == kElementsToLearn) {
      save_elements(ctx, kElementsToLearn, x.clone(), scale, zero_point, options);
      forward_(x, scale, zero_point, options);
    } else {
      save_mask(ctx, with_mask_(x, scale, zero_point, options), mask_layout(x));
    }
    return x;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return backward_of_saved(ctx, grads);
  }
};

// The gradients of an activation and of a weight are linear in grad: differentiable once more, by themselves.
class MaskBackwardFunction : public torch::autograd::Function<MaskBackwardFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& mask,
                        at::OptionalSymIntArrayRef strides) {
    const at::AutoDispatchBelowAutograd guard;
    const Tensor dx = mask_backward(grad, mask, strides);
    save_mask(ctx, mask, dx);
    return dx;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto strides = ctx->saved_data["strides"].toSymIntVector();
    return {mask_backward(grads[0], ctx->get_saved_variables()[0], at::SymIntArrayRef(strides)), Tensor(), Tensor()};
  }
};

class BackwardFunction : public torch::autograd::Function<BackwardFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& x, const Tensor& scale,
                        const Tensor& zero_point, const Options& options) {
    const at::AutoDispatchBelowAutograd guard;
    save_elements(ctx, kElements, x, scale, zero_point, options);
    return qsim::backward(grad, x, scale, zero_point, options);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {qsim::backward(grads[0], saved[0], saved[1], saved[2], Options::saved(ctx)), Tensor(), Tensor(), Tensor(),
            Tensor()};
  }
};

// Forward-mode tangents go through the Function too, which says that it has no rule for them.
bool is_differentiated(const Tensor& x) { return x.requires_grad() || x._fw_grad(0).defined(); }

bool any_differentiated(const Tensor& x, const Tensor& scale, const Tensor& zero_point) {
  return at::GradMode::is_enabled() &&
         (is_differentiated(x) || is_differentiated(scale) || is_differentiated(zero_point));
}

Tensor fake_quantize_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                              std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                              std::string_view rounding, double grad_factor) {
  if (any_differentiated(x, scale, zero_point)) {
    return FakeQuantize::apply(x, scale, zero_point,
                               Options{quant_min, quant_max, axis, block_size, std::string(rounding), grad_factor});
  }
  static const auto call = op<Forward>("qsim::fake_quantize");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                         block_size, rounding, grad_factor);
}

Tensor& fake_quantize_inplace_autograd(c10::DispatchKeySet keys, Tensor& x, const Tensor& scale,
                                       const Tensor& zero_point, std::int64_t quant_min, std::int64_t quant_max,
                                       Axis axis, Axis block_size, std::string_view rounding, double grad_factor) {
  if (any_differentiated(x, scale, zero_point)) {
    torch::autograd::check_inplace(x, true);
    FakeQuantizeInPlace::apply(x, scale, zero_point,
                               Options{quant_min, quant_max, axis, block_size, std::string(rounding), grad_factor});
    return x;
  }
  static const auto call = op<ForwardInPlace>("qsim::fake_quantize_");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                         block_size, rounding, grad_factor);
}

Tensor& fake_quantize_out_autograd(c10::DispatchKeySet keys, const Tensor& x, const Tensor& scale,
                                   const Tensor& zero_point, std::int64_t quant_min, std::int64_t quant_max, Axis axis,
                                   Axis block_size, std::string_view rounding, double grad_factor, Tensor& out) {
  TORCH_CHECK(
      !any_differentiated(x, scale, zero_point) && !(at::GradMode::is_enabled() && is_differentiated(out)),
      "qsim::fake_quantize: out= has no gradient, but one of the arguments requires grad; call it without out, or "
      "under torch.no_grad()");
  static const auto call = op<ForwardOut>("qsim::fake_quantize", "out");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, scale, zero_point, quant_min, quant_max, axis,
                         block_size, rounding, grad_factor, out);
}

Tensor mask_backward_autograd(c10::DispatchKeySet keys, const Tensor& grad, const Tensor& mask,
                              at::OptionalSymIntArrayRef strides) {
  if (at::GradMode::is_enabled() && is_differentiated(grad)) return MaskBackwardFunction::apply(grad, mask, strides);
  static const auto call = op<MaskBackward>("qsim::fake_quantize_mask_backward");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, grad, mask, strides);
}

Tensor backward_autograd(c10::DispatchKeySet keys, const Tensor& grad, const Tensor& x, const Tensor& scale,
                         const Tensor& zero_point, std::int64_t quant_min, std::int64_t quant_max, Axis axis,
                         Axis block_size, std::string_view rounding) {
  if (at::GradMode::is_enabled() && is_differentiated(grad)) {
    return BackwardFunction::apply(grad, x, scale, zero_point,
                                   Options{quant_min, quant_max, axis, block_size, std::string(rounding), 1.0});
  }
  static const auto call = op<Backward>("qsim::fake_quantize_backward");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, grad, x, scale, zero_point, quant_min, quant_max, axis,
                         block_size, rounding);
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
  m.impl("fake_quantize_", torch::CppFunction::makeFromBoxedFunction<&versioned>());
  m.impl("fake_quantize_with_mask_", torch::CppFunction::makeFromBoxedFunction<&versioned>());
}
}  // namespace qsim
