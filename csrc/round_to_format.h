// What the CPU, CUDA and Meta kernels of round_to_format check alike.
#pragma once

#include <ATen/core/Tensor.h>

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

// float8 units saturate unless told otherwise, as ONNX QuantizeLinear; float16 and bfloat16 arithmetic goes to Inf.
inline RoundToFormatOptions named_format(std::string_view format, std::optional<bool> saturate) {
  if (format == "float16") return {FloatFormat::float16, saturate.value_or(false), {}, {}};
  if (format == "bfloat16") return {FloatFormat::bfloat16, saturate.value_or(false), {}, {}};
  if (format == "float8_e4m3fn") return {FloatFormat::float8_e4m3fn, saturate.value_or(true), {}, {}};
  TORCH_CHECK_VALUE(format == "float8_e5m2", "qsim::round_to_format: got format '", format,
                    "'; expected one of 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'");
  return {FloatFormat::float8_e5m2, saturate.value_or(true), {}, {}};
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
