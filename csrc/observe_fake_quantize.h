// The arguments of observe_fake_quantize, and what its CPU, CUDA and Meta kernels check alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "choose_qparams.h"
#include "fake_quantize.h"
#include "memory.h"
#include "observe.h"
#include "qsim/observe_fake_quantize.h"

namespace qsim {

struct RunningCall {
  const at::Tensor &x, &observing, &quantizing;                      // switches: one byte each
  const at::Tensor &lowest, &highest, &counts, &scale, &zero_point;  // the state
  std::int64_t quant_min, quant_max;
  double averaging;
  std::optional<std::int64_t> axis, block_size;
  bool symmetric;
  double min_scale;
  std::string_view rounding;

  FakeQuantizeOptions check() const {
    check_range_state(x, lowest, highest, counts, axis, block_size);
    check_state(x, "scale", scale, at::kFloat, lowest.sym_sizes());
    check_state(x, "zero_point", zero_point, at::kInt, lowest.sym_sizes());
    check_switch("observing", observing);
    check_switch("quantizing", quantizing);
    check_memory(
        "qsim::observe_fake_quantize",
        {{"lowest", lowest}, {"highest", highest}, {"counts", counts}, {"scale", scale}, {"zero_point", zero_point}},
        {{"x", x}, {"observing", observing}, {"quantizing", quantizing}});
    TORCH_CHECK_VALUE(averaging >= 0 && averaging <= 1, "qsim::observe_fake_quantize: averaging is ", averaging,
                      "; expected 0 .. 1, the weight of a batch");
    TORCH_CHECK_VALUE(min_scale >= 0, "qsim::observe_fake_quantize: min_scale is ", min_scale, "; expected 0 or more");
    check_grid("observe_fake_quantize", x.scalar_type(), quant_min, quant_max);
    return {quant_min, quant_max, axis ? std::optional(wrapped_axis(x, *axis)) : axis, block_size,
            rounding_named("observe_fake_quantize", rounding)};
  }

  RunningRule rule() const { return {averaging, quant_grid(quant_min, quant_max, symmetric), min_scale}; }

  RunningRanges ranges() const {
    return {lowest.mutable_data_ptr<float>(), highest.mutable_data_ptr<float>(), scale.mutable_data_ptr<float>(),
            zero_point.mutable_data_ptr<std::int32_t>()};
  }

  // The scale in the precision that x is quantized in.
  at::Tensor grid_scale() const { return x.scalar_type() == at::kDouble ? scale.to(at::kDouble) : scale; }

 private:
  void check_switch(const char* name, const at::Tensor& on) const {
    TORCH_CHECK_TYPE(on.scalar_type() == at::kBool || on.scalar_type() == at::kByte,
                     "qsim::observe_fake_quantize: ", name, " is ", described(on.scalar_type()),
                     "; expected bool or uint8");
    TORCH_CHECK_VALUE(on.sym_numel() == 1 && on.device() == x.device(), "qsim::observe_fake_quantize: ", name,
                      " has shape ", on.sym_sizes(), " on ", on.device(), "; expected one element on x's ", x.device());
  }
};

inline const std::uint8_t* byte_of(const at::Tensor& on) {
  return static_cast<const std::uint8_t*>(on.const_data_ptr());
}

// A kernel of the operators from a function of their arguments.
template <auto run>
auto running_kernel(const at::Tensor& x, const at::Tensor& observing, const at::Tensor& quantizing,
                    const at::Tensor& lowest, const at::Tensor& highest, const at::Tensor& counts,
                    const at::Tensor& scale, const at::Tensor& zero_point, std::int64_t quant_min,
                    std::int64_t quant_max, double averaging, std::optional<std::int64_t> axis,
                    std::optional<std::int64_t> block_size, bool symmetric, double min_scale,
                    std::string_view rounding) {
  return run(RunningCall{x, observing, quantizing, lowest, highest, counts, scale, zero_point, quant_min, quant_max,
                         averaging, axis, block_size, symmetric, min_scale, rounding});
}

}  // namespace qsim
