// The straight-through gradient of round_to_format: it passes where the element is in the format, as one bit per
// element remembers. Without a gradient nothing is saved and the kernel runs directly.
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
using Saturate = std::optional<bool>;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<std::int64_t>;

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

constexpr const char* kName = "RoundToFormatBackward";

Tensor with_graph(const Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                  OptionalInt axis, OptionalInt block_size) {
  static const auto call = operator_named<WithMask>("qsim::round_to_format_with_mask");
  auto [y, mask] = [&] {
    const at::AutoDispatchBelowAutograd guard;
    return call.call(x, format, saturate, scale, axis, block_size);
  }();
  const auto node = mask_node(kName, edges_of(x), mask, mask_strides(y));
  return with_history(std::move(y), node);
}

void with_graph_(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                 OptionalInt block_size) {
  static const auto call = operator_named<WithMaskInPlace>("qsim::round_to_format_with_mask_");
  refuse_transformed("qsim::round_to_format_", x);
  torch::autograd::check_inplace(x, true);
  edge_list edges = edges_of(x);
  const auto [mask, layout] = [&] {
    const at::AutoDispatchBelowAutograd guard;
    Tensor bits = call.call(x, format, saturate, scale, axis, block_size);
    return std::pair(std::move(bits), mask_layout(x));
  }();
  with_history_(x, mask_node(kName, std::move(edges), mask, mask_strides(layout)));
}

bool is_differentiated(const Tensor& x) { return qsim::is_differentiated("qsim::round_to_format", x); }

bool is_differentiated(const Tensor& x, const OptionalTensor& scale) {
  TORCH_CHECK(!scale || !is_differentiated(*scale),
              "qsim::round_to_format: scale requires grad, but it has no gradient here; pass scale.detach()");
  return is_differentiated(x);
}

Tensor round_to_format_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, Saturate saturate,
                                const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  if (is_differentiated(x, scale)) return with_graph(x, format, saturate, scale, axis, block_size);
  static const auto call = operator_named<Forward>("qsim::round_to_format");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate, scale, axis, block_size);
}

Tensor& round_to_format_inplace_autograd(c10::DispatchKeySet keys, Tensor& x, std::string_view format,
                                         Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                                         OptionalInt block_size) {
  if (is_differentiated(x, scale)) {
    with_graph_(x, format, saturate, scale, axis, block_size);
    return x;
  }
  static const auto call = operator_named<ForwardInPlace>("qsim::round_to_format_");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate, scale, axis, block_size);
}

Tensor& round_to_format_out_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format,
                                     Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                                     OptionalInt block_size, Tensor& out) {
  TORCH_CHECK(!is_differentiated(x, scale) && !is_differentiated(out),
              "qsim::round_to_format: out= has no gradient, but one of the arguments requires grad; call it without "
              "out, or under torch.no_grad()");
  static const auto call = operator_named<ForwardOut>("qsim::round_to_format", "out");
  const at::AutoDispatchBelowAutograd guard;
  return call.redispatch(keys & c10::after_autograd_keyset, x, format, saturate, scale, axis, block_size, out);
}

// With a gradient two readings: what is counted and what is remembered for the backward pass are not fused.
Tensor counted_autograd(c10::DispatchKeySet keys, const Tensor& x, std::string_view format, const Tensor& counts,
                        const OptionalTensor& squares, Saturate saturate, const OptionalTensor& scale, OptionalInt axis,
                        OptionalInt block_size) {
  if (is_differentiated(x, scale)) {
    static const auto count = operator_named<Count>("qsim::count_format_");
    count.call(x, format, counts, squares, saturate, scale, axis, block_size);
    return with_graph(x, format, saturate, scale, axis, block_size);
  }
  static const auto call = operator_named<Counted>("qsim::round_to_format_counted");
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
  static const auto call = operator_named<Counted>("qsim::round_to_format_counted");
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
  static const auto call = operator_named<Count>("qsim::count_format_");
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
