// What the CPU, CUDA and Meta kernels of round_to_format check alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "element.h"
#include "fake_quantize.h"
#include "memory.h"
#include "observe.h"
#include "qsim/round_to_format.h"

namespace qsim {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalInt = std::optional<std::int64_t>;

struct RoundToFormatOptions {
  FloatFormat format;
  bool saturate;
  OptionalTensor scale;
  FakeQuantizeOptions granularity;  // of the scale; there is no grid
};

inline FloatFormat float_format_named(const char* op, std::string_view name) {
  for (const FloatFormat format : kAll<FloatFormat>) {
    if (name == name_of(format)) return format;
  }
  TORCH_CHECK_VALUE(false, op, ": got format '", name, "'; expected one of '", c10::Join("', '", kNames<FloatFormat>),
                    "'");
}

inline RoundToFormatOptions named_format(std::string_view name, std::optional<bool> saturate) {
  const FloatFormat format = float_format_named("qsim::round_to_format", name);
  return {format, saturate.value_or(shape_of(format).scaled), {}, {}};
}

inline RoundToFormatOptions check_round_to_format(const at::Tensor& x, std::string_view format,
                                                  std::optional<bool> saturate, const OptionalTensor& scale,
                                                  OptionalInt axis, OptionalInt block_size) {
  const char* op = "qsim::round_to_format";
  element_of(x);
  RoundToFormatOptions options = named_format(format, saturate);
  TORCH_CHECK_VALUE(scale || (!axis && !block_size), op, ": got axis or block_size, but no scale that lies along them");
  if (!scale) return options;
  check_tensors(op, x, *scale, *scale);
  if (axis) axis = wrapped_axis(x, *axis);
  options.scale = scale;
  options.granularity = {0, 0, axis, block_size, Rounding::divide};
  check_shapes(op, x, *scale, *scale, options.granularity);
  return options;
}

inline RoundToFormatOptions check_counted(const at::Tensor& x, std::string_view format, const at::Tensor& counts,
                                          const OptionalTensor& squares, std::optional<bool> saturate,
                                          const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  check_state(x, "counts", counts, at::kLong, c10::SymInt(6));
  if (squares) check_state(x, "squares", *squares, at::kDouble, c10::SymInt(2));
  check_memory("qsim::count_format_", {{"counts", counts}, {"squares", squares.value_or(at::Tensor())}},
               {{"x", x}, {"scale", scale.value_or(at::Tensor())}});
  return check_round_to_format(x, format, saturate, scale, axis, block_size);
}

}  // namespace qsim
