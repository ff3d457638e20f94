// The straight-through gradient of observe_fake_quantize in x, from one bit per element: the scale moves on with the
// next batch, so nothing could be computed again from it.
#include "observe_fake_quantize.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "autograd/mask_layout.h"
#include "autograd/nodes.h"
#include "autograd/version.h"
#include "operator_named.h"

namespace qsim {
namespace {

using at::Tensor;
using Masked = std::tuple<Tensor, Tensor>;

// Guard: which keys are done with.
template <class Guard, class Result>
Result dispatch(const char* name, const RunningCall& c) {
  using Axis = std::optional<std::int64_t>;
  using T = const Tensor&;
  using Signature =
      Result(T, T, T, T, T, T, T, T, std::int64_t, std::int64_t, double, Axis, Axis, bool, double, std::string_view);
  static const auto op = operator_named<Signature>(name);
  const Guard guard;
  return op.call(c.x, c.observing, c.quantizing, c.lowest, c.highest, c.counts, c.scale, c.zero_point, c.quant_min,
                 c.quant_max, c.averaging, c.axis, c.block_size, c.symmetric, c.min_scale, c.rounding);
}

Tensor differentiable(const RunningCall& call) {
  if (!is_differentiated("qsim::observe_fake_quantize", call.x)) {
    return dispatch<at::AutoDispatchBelowAutograd, Tensor>("qsim::observe_fake_quantize", call);
  }
  refuse_transformed("qsim::observe_fake_quantize", call.x);
  auto [y, mask] = dispatch<at::AutoDispatchBelowAutograd, Masked>("qsim::observe_fake_quantize_with_mask", call);
  const auto node = mask_node("ObserveFakeQuantizeBackward", edges_of(call.x), mask, mask_strides(y));
  return with_history(std::move(y), node);
}

// Every kernel below writes the state, so its tensors get new versions.
template <class Result>
Result versioned(const char* name, const RunningCall& call) {
  check_versions(call.lowest, call.highest, call.counts, call.scale, call.zero_point);
  Result result = dispatch<at::AutoDispatchBelowADInplaceOrView, Result>(name, call);
  bump_versions(call.lowest, call.highest, call.counts, call.scale, call.zero_point);
  return result;
}

Tensor plain_versioned(const RunningCall& call) { return versioned<Tensor>("qsim::observe_fake_quantize", call); }
Masked with_mask_versioned(const RunningCall& call) {
  return versioned<Masked>("qsim::observe_fake_quantize_with_mask", call);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("observe_fake_quantize", running_kernel<differentiable>);
  m.impl("observe_fake_quantize_with_mask", torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(qsim, ADInplaceOrView, m) {
  m.impl("observe_fake_quantize", running_kernel<plain_versioned>);
  m.impl("observe_fake_quantize_with_mask", running_kernel<with_mask_versioned>);
}
}  // namespace qsim
