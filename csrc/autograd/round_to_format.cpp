// The straight-through gradient of round_to_format: it passes where the element is in the format, as one bit per
// element remembers. Without a gradient nothing is saved and the kernel runs directly.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "autograd/version.h"

namespace qsim {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Saturate = std::optional<bool>;
using State = std::optional<Tensor>;

template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

using Forward = Tensor(const Tensor&, std::string_view, Saturate);
using ForwardOut = Tensor&(const Tensor&, std::string_view, Saturate, Tensor&);
using ForwardInPlace = Tensor&(Tensor&, std::string_view, Saturate);
using WithMask = std::tuple<Tensor, Tensor>(const Tensor&, std::string_view, Saturate);
using WithMaskInPlace = Tensor(Tensor&, std::string_view, Saturate);
using Counted = Tensor(const Tensor&, std::string_view, const Tensor&, const State&, Saturate);
using Count = void(const Tensor&, std::string_view, const Tensor&, const State&, Saturate);
using MaskBackward = Tensor(const Tensor&, const Tensor&, at::OptionalSymIntArrayRef);

void save_mask(AutogradContext* ctx, const Tensor& mask, const Tensor& y) {
  ctx->set_materialize_grads(false);
  ctx->saved_data["strides"] = y.sym_strides();
  ctx->save_for_backward({mask});
}

variable_list backward_of_mask(AutogradContext* ctx, const variable_list& grads) {
  if (!grads[0].defined()) return {Tensor(), Tensor(), Tensor()};
  static const auto call = op<MaskBackward>("qsim::fake_quantize_mask_backward");
  const auto strides = ctx->saved_data["strides"].toSymIntVector();
  return {call.call(grads[0], ctx->get_saved_variables()[0], at::SymIntArrayRef(strides)), Tensor(), Tensor()};
}

class RoundToFormat : public torch::autograd::Function<RoundToFormat> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& format, Saturate saturate) {
    static const auto call = op<WithMask>("qsim::round_to_format_with_mask");
    const at::AutoDispatchBelowAutograd guard;
    const auto [y, mask] = call.call(x, format, saturate);
    save_mask(ctx, mask, y);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return backward_of_mask(ctx, grads);
  }
};

class RoundToFormatInPlace : public torch::autograd::Function<RoundToFormatInPlace> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, Tensor x, const std::string& format, Saturate saturate) {
    static const auto call = op<WithMaskInPlace>("qsim::round_to_format_with_mask_");
    const at::AutoDispatchBelowAutograd guard;
    ctx->mark_dirty({x});
    save_mask(ctx, call.call(x, format, saturate), x);
    return x;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return backward_of_mask(ctx, grads);
  }
};

// Forward-mode tangents go through the Function too, which says that it has no rule for them.
bool is_differentiated(const Tensor& x) {
  return at::GradMode::is_enabled() && (x.requires_grad() || x._fw_grad(0).defined());
}

Tensor round_to_format_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, Saturate saturate) {
  if (is_differentiated(x)) return RoundToFormat::apply(x, std::string(format), saturate);
  static const auto call = op<Forward>("qsim::round_to_format");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate);
}

Tensor& round_to_format_inplace_autograd(c10::DispatchKeySet keys, Tensor& x, std::string_view format,
                                         Saturate saturate) {
  if (is_differentiated(x)) {
    torch::autograd::check_inplace(x, true);
    RoundToFormatInPlace::apply(x, std::string(format), saturate);
    return x;
  }
  static const auto call = op<ForwardInPlace>("qsim::round_to_format_");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate);
}

Tensor& round_to_format_out_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format,
                                     Saturate saturate, Tensor& out) {
  TORCH_CHECK(!is_differentiated(x) && !is_differentiated(out),
              "qsim::round_to_format: out= has no gradient, but one of the arguments requires grad; call it without "
              "out, or under torch.no_grad()");
  static const auto call = op<ForwardOut>("qsim::round_to_format", "out");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate, out);
}

// With a gradient two readings: what is counted and what is remembered for the backward pass are not fused.
Tensor counted_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, const Tensor& counts,
                        const State& squares, Saturate saturate) {
  if (is_differentiated(x)) {
    static const auto count = op<Count>("qsim::count_format_");
    count.call(x, format, counts, squares, saturate);
    return RoundToFormat::apply(x, std::string(format), saturate);
  }
  static const auto call = op<Counted>("qsim::round_to_format_counted");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, counts, squares, saturate);
}

void bump_state(const Tensor& counts, const State& squares) {
  bump_versions({counts});
  if (squares) bump_versions({*squares});
}

Tensor counted_versioned(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, const Tensor& counts,
                         const State& squares, Saturate saturate) {
  static const auto call = op<Counted>("qsim::round_to_format_counted");
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor y = call.redispatch(keys & c10::after_ADInplaceOrView_keyset, x, format, counts, squares, saturate);
  bump_state(counts, squares);
  return y;
}

void count_versioned(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, const Tensor& counts,
                     const State& squares, Saturate saturate) {
  static const auto call = op<Count>("qsim::count_format_");
  const at::AutoDispatchBelowADInplaceOrView below;
  call.redispatch(keys & c10::after_ADInplaceOrView_keyset, x, format, counts, squares, saturate);
  bump_state(counts, squares);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("round_to_format", round_to_format_autograd);
  m.impl("round_to_format.out", round_to_format_out_autograd);
  m.impl("round_to_format_", round_to_format_inplace_autograd);
  m.impl("round_to_format_counted", counted_autograd);
  m.impl("count_format_", torch::CppFunction::makeFallthrough());
  m.impl("round_to_format_with_mask", torch::autograd::autogradNotImplementedFallback());
  m.impl("round_to_format_with_mask_", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(qsim, ADInplaceOrView, m) {  // version counters, also in inference mode
  m.impl("round_to_format.out", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  m.impl("round_to_format_", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  m.impl("round_to_format_with_mask_", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  m.impl("round_to_format_counted", counted_versioned);
  m.impl("count_format_", count_versioned);
}
}  // namespace qsim
