// Dynamic quantization: what its kernels check alike, and how it is put together from the operators that observe
// ranges, choose scales and round. The results are the same bits, fused or not.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <optional>
#include <string>
#include <string_view>

#include "block_scale.h"
#include "choose_qparams.h"
#include "element.h"
#include "fake_quantize.h"
#include "operator_named.h"
#include "round_to_format.h"

namespace qsim {

// Which elements share a scale, and how it is chosen. Without an axis all do; without a block size a block is as long
// as the axis.
struct DynamicGroups {
  OptionalInt axis, block_size;  // axis of x, not negative
  QuantGrid grid;
  double min_scale;
  std::optional<BlockScaleRule> blocks;

  c10::SymDimVector shape(const at::Tensor& x) const {
    if (!axis) return {};
    c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
    const auto a = static_cast<std::size_t>(*axis);
    shape[a] = blocks_in(shape[a], *block_size);
    return shape;
  }
};

inline DynamicGroups check_groups(const char* op, const at::Tensor& x, OptionalInt axis, OptionalInt block_size,
                                  double min_scale) {
  element_of(x);
  check_min_scale(min_scale);
  TORCH_CHECK_VALUE(axis || !block_size, op, ": block_size ", block_size.value_or(0),
                    " without an axis; give the axis that the blocks lie along");
  TORCH_CHECK_VALUE(block_size.value_or(1) > 0, op, ": block_size is ", block_size.value_or(1), "; expected 1 or more");
  if (axis) {
    axis = wrapped_axis(x, *axis);
    block_size = block_size.value_or(INT64_MAX);
  }
  return {axis, block_size, {}, min_scale, std::nullopt};
}

// A call of fake_quantize_dynamic.
struct IntegerCall : DynamicGroups {
  static constexpr const char* kOp = "qsim::fake_quantize_dynamic";
  Rounding rounding;
  std::string rounding_name, element, scale_format, scale_rounding;

  IntegerCall(const at::Tensor& x, std::int64_t quant_min, std::int64_t quant_max, OptionalInt axis_given,
              OptionalInt block_given, bool symmetric, std::string_view rounding_given, double min_scale_given,
              std::optional<std::string_view> scale_format_given, std::string_view scale_rounding_given)
      : DynamicGroups(check_groups(kOp, x, axis_given, block_given, min_scale_given)),
        rounding(rounding_named(kOp, rounding_given)),
        rounding_name(rounding_given),
        scale_format(scale_format_given.value_or("")),
        scale_rounding(scale_rounding_given) {
    check_grid(kOp, x.scalar_type(), quant_min, quant_max);
    grid = quant_grid(quant_min, quant_max, symmetric);
    scale_rounding_named(kOp, scale_rounding);
    if (!scale_format_given) return;
    int bits = 2;
    while (bits < 16 && (std::int64_t{1} << (bits - 1)) <= quant_max) ++bits;
    const std::int64_t largest = (std::int64_t{1} << (bits - 1)) - 1;
    TORCH_CHECK_VALUE(symmetric && quant_max == largest && (quant_min == -largest || quant_min == -largest - 1), kOp,
                      ": got scale_format='", scale_format, "' with the grid ", quant_min, " .. ", quant_max,
                      symmetric ? "" : ", not symmetric", "; expected a signed grid of 2 to 16 bits, symmetric=True");
    element = "int" + std::to_string(bits);
    blocks = block_scale_rule(kOp, integer_element(bits), scale_format, scale_rounding);
  }
};

// A call of round_to_format_dynamic.
struct FormatCall : DynamicGroups {
  static constexpr const char* kOp = "qsim::round_to_format_dynamic";
  RoundToFormatOptions options;
  std::string element, scale_format, scale_rounding;

  FormatCall(const at::Tensor& x, std::string_view format, OptionalInt axis_given, OptionalInt block_given,
             std::optional<bool> saturate, double min_scale_given, std::optional<std::string_view> scale_format_given,
             std::string_view scale_rounding_given)
      : DynamicGroups(check_groups(kOp, x, axis_given, block_given, min_scale_given)),
        options(named_format(format, saturate)),
        element(format),
        scale_format(scale_format_given.value_or("")),
        scale_rounding(scale_rounding_given) {
    TORCH_CHECK_VALUE(shape_of(options.format).scaled, kOp, ": ", format,
                      " is rounded to without a scale; use qsim::round_to_format");
    const BlockElement numbers = float_element(options.format);
    scale_rounding_named(kOp, scale_rounding);
    if (scale_format_given) {
      blocks = block_scale_rule(kOp, numbers, scale_format, scale_rounding);
      return;
    }
    const auto largest = static_cast<std::int64_t>(numbers.largest);
    TORCH_CHECK_VALUE(static_cast<float>(largest) == numbers.largest, kOp, ": ", format,
                      " has no scale in float32; expected scale_format='float8_e8m0fnu'");
    grid = quant_grid(-largest, largest, true);
  }
};

struct DynamicParams {
  at::Tensor scale, zero_point;
};

// Of every group of x; neither is differentiated.
inline DynamicParams dynamic_params(const at::Tensor& x, const DynamicGroups& groups, const std::string& element,
                                    const std::string& scale_format, const std::string& scale_rounding) {
  using T = const at::Tensor&;
  static const auto observe = operator_named<void(T, T, T, T, OptionalInt, OptionalInt)>("qsim::observe_range_");
  static const auto choose =
      operator_named<std::tuple<at::Tensor, at::Tensor>(T, T, std::int64_t, std::int64_t, bool, double)>(
          "qsim::choose_qparams");
  static const auto choose_stored =
      operator_named<at::Tensor(T, T, std::string_view, std::string_view, std::string_view)>(
          "qsim::choose_block_scale");
  const auto float32 = x.options().dtype(at::kFloat).requires_grad(false);
  const auto shape = groups.shape(x);
  const at::Tensor lowest = at::full_symint(shape, INFINITY, float32),
                   highest = at::full_symint(shape, -INFINITY, float32);
  const at::Tensor counts = at::zeros({4}, float32.dtype(at::kLong));
  observe.call(x.detach(), lowest, highest, counts, groups.axis, groups.block_size);
  if (groups.blocks) {
    const at::Tensor scale = choose_stored.call(lowest, highest, element, scale_format, scale_rounding);
    return {scale, at::zeros_like(scale, float32.dtype(at::kInt))};
  }
  const auto [scale, zero_point] = choose.call(lowest, highest, groups.grid.quant_min, groups.grid.quant_max,
                                               groups.grid.symmetric, groups.min_scale);
  return {scale, zero_point};
}

inline at::Tensor in_precision_of(const at::Tensor& x, const at::Tensor& scale) {
  return x.scalar_type() == at::kDouble ? scale.to(at::kDouble) : scale;
}

inline at::Tensor compose(const at::Tensor& x, const IntegerCall& call) {
  using T = const at::Tensor&;
  static const auto quantize = operator_named<at::Tensor(T, T, T, std::int64_t, std::int64_t, OptionalInt, OptionalInt,
                                                         std::string_view, double)>("qsim::fake_quantize");
  const auto [scale, zero_point] = dynamic_params(x, call, call.element, call.scale_format, call.scale_rounding);
  return quantize.call(x, in_precision_of(x, scale), zero_point, call.grid.quant_min, call.grid.quant_max, call.axis,
                       call.block_size, call.rounding_name, 1.0);
}

inline at::Tensor compose(const at::Tensor& x, const FormatCall& call) {
  using T = const at::Tensor&;
  static const auto round = operator_named<at::Tensor(T, std::string_view, std::optional<bool>, const OptionalTensor&,
                                                      OptionalInt, OptionalInt)>("qsim::round_to_format");
  const auto params = dynamic_params(x, call, call.element, call.scale_format, call.scale_rounding);
  return round.call(x, call.element, call.options.saturate, in_precision_of(x, params.scale), call.axis,
                    call.block_size);
}

// Kernels of the two operators from a function of x and a call.
template <auto run>
at::Tensor integer_kernel(const at::Tensor& x, std::int64_t quant_min, std::int64_t quant_max, OptionalInt axis,
                          OptionalInt block_size, bool symmetric, std::string_view rounding, double min_scale,
                          std::optional<std::string_view> scale_format, std::string_view scale_rounding) {
  return run(x, IntegerCall(x, quant_min, quant_max, axis, block_size, symmetric, rounding, min_scale, scale_format,
                            scale_rounding));
}

template <auto run>
at::Tensor format_kernel(const at::Tensor& x, std::string_view format, OptionalInt axis, OptionalInt block_size,
                         std::optional<bool> saturate, double min_scale, std::optional<std::string_view> scale_format,
                         std::string_view scale_rounding) {
  return run(x, FormatCall(x, format, axis, block_size, saturate, min_scale, scale_format, scale_rounding));
}

}  // namespace qsim
