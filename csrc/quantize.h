// What the CPU, CUDA and Meta kernels of quantize and dequantize check alike.
#pragma once

#include "fake_quantize.h"
#include "qsim/quantize.h"

namespace qsim {

struct IntegerType {
  Integer kind;
  std::int64_t lowest, highest;
};

inline std::optional<IntegerType> integer_type(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return IntegerType{Integer::i8, INT8_MIN, INT8_MAX};
    case at::kByte:
      return IntegerType{Integer::u8, 0, UINT8_MAX};
    case at::kShort:
      return IntegerType{Integer::i16, INT16_MIN, INT16_MAX};
    case at::kUInt16:
      return IntegerType{Integer::u16, 0, UINT16_MAX};
    default:
      return std::nullopt;
  }
}

// The given storage type, or the smallest that holds the grid: an unsigned one for a grid without negative numbers.
inline at::ScalarType storage_type(std::int64_t quant_min, std::int64_t quant_max,
                                   std::optional<at::ScalarType> dtype) {
  const auto holds = [&](at::ScalarType type) {
    const auto integers = integer_type(type);
    return integers && integers->lowest <= quant_min && quant_max <= integers->highest;
  };
  if (dtype) {
    TORCH_CHECK_TYPE(integer_type(*dtype), "qsim::quantize: dtype is ", *dtype,
                     "; expected int8, uint8, int16 or uint16");
    TORCH_CHECK_VALUE(holds(*dtype), "qsim::quantize: the grid ", quant_min, " .. ", quant_max, " does not fit into ",
                      *dtype);
    return *dtype;
  }
  for (at::ScalarType type : {at::kByte, at::kChar, at::kUInt16, at::kShort}) {
    if (holds(type)) return type;
  }
  TORCH_CHECK_VALUE(false, "qsim::quantize: the grid ", quant_min, " .. ", quant_max,
                    " does not fit into int8, uint8, int16 or uint16");
}

inline void check_integer_zero_point(const char* op, const at::Tensor& zero_point) {
  TORCH_CHECK_TYPE(zero_point.scalar_type() == at::kInt, op, ": zero_point is ", described(zero_point.scalar_type()),
                   "; expected Int: a learned zero point is rounded before its integers are stored");
}

inline FakeQuantizeOptions check_quantize(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point,
                                          std::int64_t quant_min, std::int64_t quant_max,
                                          std::optional<std::int64_t> axis, std::optional<std::int64_t> block_size,
                                          std::string_view rounding) {
  check_integer_zero_point("qsim::quantize", zero_point);
  return check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, "qsim::quantize");
}

// The grid is all of the storage type of q.
inline FakeQuantizeOptions check_dequantize(const at::Tensor& q, const at::Tensor& scale, const at::Tensor& zero_point,
                                            std::optional<std::int64_t> axis, std::optional<std::int64_t> block_size) {
  const char* op = "qsim::dequantize";
  const auto integers = integer_type(q.scalar_type());
  TORCH_CHECK_TYPE(integers, op, ": q is ", described(q.scalar_type()), "; expected int8, uint8, int16 or uint16");
  TORCH_CHECK_TYPE(scale.scalar_type() == at::kFloat || scale.scalar_type() == at::kDouble, op, ": scale is ",
                   described(scale.scalar_type()), "; expected float32 or float64");
  check_integer_zero_point(op, zero_point);
  check_devices(op, q, scale, zero_point);
  if (axis) axis = wrapped_axis(q, *axis);
  const FakeQuantizeOptions options{integers->lowest, integers->highest, axis, block_size, Rounding::divide};
  check_shapes(op, q, scale, zero_point, options);
  return options;
}

// The given dtype of the result, or that of scale. Arithmetic is that of scale.
inline at::ScalarType result_type(const at::Tensor& scale, std::optional<at::ScalarType> dtype) {
  const at::ScalarType wide = scale.scalar_type(), type = dtype.value_or(wide);
  const bool fits =
      wide == at::kDouble ? type == at::kDouble : type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
  TORCH_CHECK_TYPE(fits, "qsim::dequantize: dtype is ", type, " and scale ", wide,
                   "; expected float32, float16 or bfloat16 for a float32 scale, float64 for a float64 scale");
  return type;
}

}  // namespace qsim
