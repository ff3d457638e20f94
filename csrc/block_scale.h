// What the CPU, CUDA and Meta kernels of choose_block_scale check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <charconv>
#include <cmath>
#include <optional>
#include <string_view>

#include "described.h"
#include "qsim/block_scale.h"
#include "round_to_format.h"

namespace qsim {

inline ScaleFormat scale_format_named(const char* op, std::string_view name) {
  if (name == "float8_e8m0fnu") return ScaleFormat::e8m0;
  TORCH_CHECK_VALUE(name == "float8_e4m3fn", op, ": got scale_format='", name,
                    "'; expected 'float8_e8m0fnu' (powers of two) or 'float8_e4m3fn' (beside one float32 a tensor)");
  return ScaleFormat::e4m3;
}

inline ScaleRounding scale_rounding_named(const char* op, std::string_view name) {
  if (name == "floor") return ScaleRounding::floor;
  if (name == "ceil") return ScaleRounding::ceil;
  if (name == "even") return ScaleRounding::even;
  TORCH_CHECK_VALUE(name == "rceil", op, ": got scale_rounding='", name,
                    "'; expected one of 'floor', 'ceil', 'even', 'rceil'");
  return ScaleRounding::rceil;
}

// Integers of so many bits, symmetric, as fractions of magnitude below 2 (MXINT8 of the OCP MX specification).
inline BlockElement integer_element(int bits) {
  const float steps = std::ldexp(1.f, bits - 2);
  return {bits - 2, 0, (2 * steps - 1) / steps, 1 / steps};
}

inline BlockElement float_element(FloatFormat format) {
  const FormatShape shape = shape_of(format);
  return {shape.mantissa, shape.top_exponent, static_cast<float>(shape.largest), 1};
}

inline BlockScaleRule block_scale_rule(const char* op, BlockElement element, std::string_view scale_format,
                                       std::string_view scale_rounding) {
  return {scale_format_named(op, scale_format), scale_rounding_named(op, scale_rounding), element,
          format_in<float>(FloatFormat::float8_e4m3fn, true)};
}

// "int2" .. "int16", or a float format that has a scale.
inline BlockElement element_named(const char* op, std::string_view name) {
  if (name.starts_with("int")) {
    int bits = 0;
    const auto [end, error] = std::from_chars(name.data() + 3, name.data() + name.size(), bits);
    TORCH_CHECK_VALUE(error == std::errc() && end == name.data() + name.size() && bits >= 2 && bits <= 16, op,
                      ": got element '", name, "'; expected 'int2' .. 'int16' or a float format");
    return integer_element(bits);
  }
  return float_element(float_format_named(op, name));
}

inline BlockScaleRule check_block_scale(const at::Tensor& lowest, const at::Tensor& highest, std::string_view element,
                                        std::string_view scale_format, std::string_view scale_rounding) {
  const char* op = "qsim::choose_block_scale";
  TORCH_CHECK_TYPE(lowest.scalar_type() == at::kFloat && highest.scalar_type() == at::kFloat, op, ": lowest is ",
                   described(lowest.scalar_type()), " and highest ", described(highest.scalar_type()),
                   "; expected both float32");
  TORCH_CHECK_VALUE(lowest.sym_sizes() == highest.sym_sizes() && lowest.device() == highest.device(), op,
                    ": lowest is ", described(lowest), " and highest ", described(highest),
                    "; expected one shape and device");
  return block_scale_rule(op, element_named(op, element), scale_format, scale_rounding);
}

inline at::Tensor empty_block_scale(const at::Tensor& lowest) {
  return at::empty_like(lowest, lowest.options(), at::MemoryFormat::Contiguous);
}

}  // namespace qsim
