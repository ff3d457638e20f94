// The straight-through gradient of round_to_format: it passes where the element is in the format, as one bit per
// element remembers. Without a gradient nothing is saved and the kernel runs directly.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "autograd/mask_layout.h"
#include "autograd/version.h"

namespace qsim {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Saturate = std::optional<bool>;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<std::int64_t>;

template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

using Forward = Tensor(const Tensor&, std::string_view, Saturate, const OptionalTensor&, OptionalInt, OptionalInt);
using ForwardOut = Tensor&(const Tensor&, std::string_view, Saturate, const OptionalTensor&, OptionalInt, OptionalInt,
                           Tensor&);
using ForwardInPlace = Tensor&(Tensor&, std::string_view, Saturate, const OptionalTensor&, OptionalInt, OptionalInt);
using WithMask = std::tuple<Tensor, Tensor>(const Tensor&, std::string_view, Saturate, const OptionalTensor&,
                                            OptionalInt, OptionalInt);
using WithMaskInPlace = Tensor(Tensor&, std::string_view, Saturate, const OptionalTensor&, OptionalInt, OptionalInt);
using Counted = Tensor(const Tensor&, std::string_view, const Tensor&, const OptionalTensor&, Saturate,
                       const OptionalTensor&, OptionalInt, OptionalInt);
using Count = void(const Tensor&, std::string_view, const Tensor&, const OptionalTensor&, Saturate,
                   const OptionalTensor&, OptionalInt, OptionalInt);
using MaskBackward = Tensor(const Tensor&, const Tensor&, at::OptionalSymIntArrayRef);

void save_mask(AutogradContext* ctx, const Tensor& mask, const Tensor& y) {
  ctx->set_materialize_grads(false);
  ctx->saved_data["strides"] = y.sym_strides();
  ctx->save_for_backward({mask});
}

variable_list backward_of_mask(AutogradContext* ctx, const variable_list& grads) {
  variable_list given(6);  // x, format and the options, of which none has a gradient
  if (!grads[0].defined()) return given;
  static const auto call = op<MaskBackward>("qsim::fake_quantize_mask_backward");
  const auto strides = ctx->saved_data["strides"].toSymIntVector();
  given[0] = call.call(grads[0], ctx->get_saved_variables()[0], at::SymIntArrayRef(strides));
  return given;
}

class RoundToFormat : public torch::autograd::Function<RoundToFormat> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::string& format, Saturate saturate,
                        const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
    static const auto call = op<WithMask>("qsim::round_to_format_with_mask");
    const at::AutoDispatchBelowAutograd guard;
    const auto [y, mask] = call.call(x, format, saturate, scale, axis, block_size);
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

  static Tensor forward(AutogradContext* ctx, Tensor x, const std::string& format, Saturate saturate,
                        const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
    static const auto call = op<WithMaskInPlace>("qsim::round_to_format_with_mask_");
    const at::AutoDispatchBelowAutograd guard;
    ctx->mark_dirty({x});
    save_mask(ctx, call.call(x, format, saturate, scale, axis, block_size), mask_layout(x));
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

bool is_differentiated(const Tensor& x, const OptionalTensor& scale) {
  TORCH_CHECK(!scale || !is_differentiated(*scale),
              "qsim::round_to_format: scale requires grad, but it has no gradient here; pass scale.detach()");
  return is_differentiated(x);
}

Tensor round_to_format_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, Saturate saturate,
                                const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  if (is_differentiated(x, scale))
    return RoundToFormat::apply(x, std::string(format), saturate, scale, axis, block_size);
  static const auto call = op<Forward>("qsim::round_to_format");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate, scale, axis, block_size);
}

Tensor& round_to_format_inplace_autograd(c10::DispatchKeySet keys, Tensor& x, std::string_view format,
                                         Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                                         OptionalInt block_size) {
  if (is_differentiated(x, scale)) {
    torch::autograd::check_inplace(x, true);
    RoundToFormatInPlace::apply(x, std::string(format), saturate, scale, axis, block_size);
    return x;
  }
  static const auto call = op<ForwardInPlace>("qsim::round_to_format_");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate, scale, axis, block_size);
}

Tensor& round_to_format_out_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format,
                                     Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                                     OptionalInt block_size, Tensor& out) {
  TORCH_CHECK(!is_differentiated(x, scale) && !is_differentiated(out),
              "qsim::round_to_format: out= has no gradient, but one of the arguments requires grad; call it without "
              "out, or under torch.no_grad()");
  static const auto call = op<ForwardOut>("qsim::round_to_format", "out");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate, scale, axis, block_size, out);
}

// With a gradient two readings: what is counted and what is remembered for the backward pass are not fused.
Tensor counted_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, const Tensor& counts,
                        const OptionalTensor& squares, Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                        OptionalInt block_size) {
  if (is_differentiated(x, scale)) {
    static const auto count = op<Count>("qsim::count_format_");
    count.call(x, format, counts, squares, saturate, scale, axis, block_size);
    return RoundToFormat::apply(x, std::string(format), saturate, scale, axis, block_size);
  }
  static const auto call = op<Counted>("qsim::round_to_format_counted");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, counts, squares, saturate, scale, axis,
                         block_size);
}

void check_state(const Tensor& counts, const OptionalTensor& squares) {
  check_version(counts);
  if (squares) check_version(*squares);
}

void bump_state(const Tensor& counts, const OptionalTensor& squares) {
  bump_version(counts);
  if (squares) bump_version(*squares);
}

Tensor counted_versioned(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, const Tensor& counts,
                         const OptionalTensor& squares, Saturate saturate, const OptionalTensor& scale,
                         OptionalInt axis, OptionalInt block_size) {
  static const auto call = op<Counted>("qsim::round_to_format_counted");
  check_state(counts, squares);
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor y = call.redispatch(keys & c10::after_ADInplaceOrView_keyset, x, format, counts, squares, saturate,
                                   scale, axis, block_size);
  bump_state(counts, squares);
  return y;
}

void count_versioned(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, const Tensor& counts,
                     const OptionalTensor& squares, Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                     OptionalInt block_size) {
  static const auto call = op<Count>("qsim::count_format_");
  check_state(counts, squares);
  const at::AutoDispatchBelowADInplaceOrView below;
  call.redispatch(keys & c10::after_ADInplaceOrView_keyset, x, format, counts, squares, saturate, scale, axis,
                  block_size);
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
  m.impl("round_to_format.out", torch::CppFunction::makeFromBoxedFunction<&versioned>());
  m.impl("round_to_format_", torch::CppFunction::makeFromBoxedFunction<&versioned>());
  m.impl("round_to_format_with_mask_", torch::CppFunction::makeFromBoxedFunction<&versioned>());
  m.impl("round_to_format_counted", counted_versioned);
  m.impl("count_format_", count_versioned);
}
}  // namespace qsim
