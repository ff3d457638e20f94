// On the CPU the switches are read as they stand, and the operator is what its parts do: the range of the batch, the
// step of the running range, fake_quantize.
#include "observe_fake_quantize.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "cpu/subnormals.h"
#include "operator_named.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;
using ObserveRange = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, Axis, Axis);
using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t, Axis, Axis,
                       std::string_view, double);
using WithMask = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int64_t,
                                            Axis, Axis, std::string_view);

void observe(const RunningCall& call) {
  static const auto observe_range = operator_named<ObserveRange>("qsim::observe_range_");
  const Tensor lowest = at::full_like(call.lowest, INFINITY), highest = at::full_like(call.highest, -INFINITY);
  observe_range.call(call.x, lowest, highest, call.counts, call.axis, call.block_size);
  cpu::running_range_kernels().follow(lowest.const_data_ptr<float>(), highest.const_data_ptr<float>(), lowest.numel(),
                                      call.rule(), call.ranges());
}

// Returns whether to quantize.
bool begin(const RunningCall& call) {
  call.check();
  if (*byte_of(call.observing) != 0) observe(call);
  return *byte_of(call.quantizing) != 0;
}

// As RunningCall::grid_scale, but in this thread, which keeps subnormals.
Tensor grid_scale(const RunningCall& call) {
  if (call.x.scalar_type() != at::kDouble) return call.scale;
  const Tensor wide = at::empty_like(call.scale, call.scale.options().dtype(at::kDouble));
  const auto* from = call.scale.const_data_ptr<float>();
  std::copy(from, from + wide.numel(), wide.mutable_data_ptr<double>());
  return wide;
}

Tensor plain(const RunningCall& call) {
  static const auto forward = operator_named<Forward>("qsim::fake_quantize");
  const KeepSubnormals guard;
  if (!begin(call)) return at::clone(call.x);
  return forward.call(call.x, grid_scale(call), call.zero_point, call.quant_min, call.quant_max, call.axis,
                      call.block_size, call.rounding, 1.0);
}

// Every element is in range, and bits past the end are 0.
Tensor full_mask(const Tensor& x) {
  const Tensor mask = empty_mask(x).fill_(0xff);
  if (const auto rest = x.numel() % 8) mask.mutable_data_ptr<std::uint8_t>()[x.numel() / 8] = (1 << rest) - 1;
  return mask;
}

std::tuple<Tensor, Tensor> with_mask(const RunningCall& call) {
  static const auto forward = operator_named<WithMask>("qsim::fake_quantize_with_mask");
  const KeepSubnormals guard;
  if (!begin(call)) return {at::clone(call.x), full_mask(call.x)};
  return forward.call(call.x, grid_scale(call), call.zero_point, call.quant_min, call.quant_max, call.axis,
                      call.block_size, call.rounding);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("observe_fake_quantize", running_kernel<plain>);
  m.impl("observe_fake_quantize_with_mask", running_kernel<with_mask>);
}
}  // namespace qsim
