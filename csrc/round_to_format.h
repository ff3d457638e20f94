// What the CPU, CUDA and Meta kernels of round_to_format check alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "element.h"
#include "observe.h"
#include "qsim/round_to_format.h"

namespace qsim {

struct RoundToFormatOptions {
  FloatFormat format;
  bool saturate;
};

// float8 units saturate unless told otherwise, as ONNX QuantizeLinear; float16 and bfloat16 arithmetic goes to Inf.
inline RoundToFormatOptions check_round_to_format(const at::Tensor& x, std::string_view format,
                                                  std::optional<bool> saturate) {
  element_of(x);
  if (format == "float16") return {FloatFormat::float16, saturate.value_or(false)};
  if (format == "bfloat16") return {FloatFormat::bfloat16, saturate.value_or(false)};
  if (format == "float8_e4m3fn") return {FloatFormat::float8_e4m3fn, saturate.value_or(true)};
  TORCH_CHECK_VALUE(format == "float8_e5m2", "qsim::round_to_format: got format '", format,
                    "'; expected one of 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2'");
  return {FloatFormat::float8_e5m2, saturate.value_or(true)};
}

inline RoundToFormatOptions check_counted(const at::Tensor& x, std::string_view format, std::optional<bool> saturate,
                                          const at::Tensor& counts, const std::optional<at::Tensor>& squares) {
  check_state(x, "counts", counts, at::kLong, c10::SymInt(6));
  if (squares) check_state(x, "squares", *squares, at::kDouble, c10::SymInt(2));
  return check_round_to_format(x, format, saturate);
}

}  // namespace qsim
