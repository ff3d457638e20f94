// What the CPU, CUDA and Meta kernels of fake_quantize check and allocate alike. Sizes are read as SymInt: the Meta
// kernels also serve torch.compile with dynamic shapes. The values of scale and zero_point are never read here.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymIntArrayRef.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "described.h"
#include "element.h"
#include "memory.h"
#include "qsim/fake_quantize.h"

namespace qsim {

struct FakeQuantizeOptions {
  std::int64_t quant_min, quant_max;
  std::optional<std::int64_t> axis;  // of x, not negative
  std::optional<std::int64_t> block_size;
  Rounding rounding;
};

inline Rounding rounding_named(const char* op, std::string_view name) {
  if (name == "divide") return Rounding::divide;
  TORCH_CHECK_VALUE(name == "reciprocal", op, ": rounding is '", name,
                    "'; expected 'divide' (x / scale, as ONNX) or 'reciprocal' (x * (1 / scale), as torch core)");
  return Rounding::reciprocal;
}

inline void check_grid(const char* op, at::ScalarType type, std::int64_t quant_min, std::int64_t quant_max) {
  const std::int64_t exact = std::int64_t{1} << 24;  // integers up to here are exact in float32
  TORCH_CHECK_VALUE(quant_min < quant_max && quant_min >= INT32_MIN && quant_max <= INT32_MAX, op, ": quant_min ",
                    quant_min, " and quant_max ", quant_max, " are no int32 grid with quant_min < quant_max");
  TORCH_CHECK_VALUE(
      type == at::kDouble || (quant_min >= -exact && quant_max <= exact && quant_max - quant_min <= exact), op,
      ": the grid ", quant_min, " .. ", quant_max, " is not exact in the float32 arithmetic of ", type,
      " tensors; expected it within -2^24 .. 2^24 and at most 2^24 wide, or x as float64");
}

inline void check_devices(const char* op, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point) {
  TORCH_CHECK_VALUE(scale.device() == x.device() && zero_point.device() == x.device(), op, ": the input is on ",
                    x.device(), ", scale on ", scale.device(), " and zero_point on ", zero_point.device(),
                    "; expected one device");
}

inline void check_tensors(const char* op, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point) {
  const at::ScalarType type = x.scalar_type(), expected = type == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(is_element(type), op, ": x is ", described(type),
                   "; expected float16, bfloat16, float32 or float64");
  TORCH_CHECK_TYPE(scale.scalar_type() == expected, op, ": scale is ", described(scale.scalar_type()), "; expected ",
                   expected, " for x of ", type);
  TORCH_CHECK_TYPE(zero_point.scalar_type() == at::kInt || zero_point.scalar_type() == expected, op, ": zero_point is ",
                   described(zero_point.scalar_type()), "; expected Int, or ", expected, " when it is learned");
  check_devices(op, x, scale, zero_point);
}

inline void check_shapes(const char* op, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point,
                         const FakeQuantizeOptions& options) {
  if (!options.axis) {
    TORCH_CHECK_VALUE(!options.block_size, op, ": block_size ", *options.block_size,
                      " without an axis; give the axis that the blocks lie along");
    TORCH_CHECK_VALUE(scale.dim() <= 1 && scale.sym_numel() == 1, op, ": scale has shape ", scale.sym_sizes(),
                      "; expected one element, or give axis for a scale per channel");
    TORCH_CHECK_VALUE(zero_point.dim() <= 1 && zero_point.sym_numel() == 1, op, ": zero_point has shape ",
                      zero_point.sym_sizes(), "; expected one element, as scale");
    return;
  }
  TORCH_CHECK_VALUE(scale.sym_sizes() == zero_point.sym_sizes(), op, ": scale has shape ", scale.sym_sizes(),
                    " and zero_point ", zero_point.sym_sizes(), "; expected the same shape");
  const std::int64_t axis = *options.axis;
  if (!options.block_size) {
    TORCH_CHECK_VALUE(scale.dim() == 1 && scale.sym_size(0) == x.sym_size(axis), op, ": scale has shape ",
                      scale.sym_sizes(), "; expected [", x.sym_size(axis), "], one per channel of axis ", axis,
                      " of x with shape ", x.sym_sizes());
    return;
  }
  const std::int64_t block = *options.block_size;
  TORCH_CHECK_VALUE(block > 0, op, ": block_size ", block, "; expected at least 1");
  bool matches = scale.dim() == x.dim();
  for (std::int64_t i = 0; matches && i < x.dim(); ++i) {
    const c10::SymInt length = x.sym_size(i);
    matches = scale.sym_size(i) == (i == axis ? blocks_in(length, block) : length);
  }
  TORCH_CHECK_VALUE(matches, op, ": scale has shape ", scale.sym_sizes(), "; expected the shape of x, ", x.sym_sizes(),
                    ", with ceil(", x.sym_size(axis), " / ", block, ") along axis ", axis);
}

inline FakeQuantizeOptions check_fake_quantize(const at::Tensor& x, const at::Tensor& scale,
                                               const at::Tensor& zero_point, std::int64_t quant_min,
                                               std::int64_t quant_max, std::optional<std::int64_t> axis,
                                               std::optional<std::int64_t> block_size, std::string_view rounding,
                                               const char* op = "qsim::fake_quantize") {
  check_tensors(op, x, scale, zero_point);
  check_grid(op, x.scalar_type(), quant_min, quant_max);
  if (axis) axis = wrapped_axis(x, *axis);
  const FakeQuantizeOptions options{quant_min, quant_max, axis, block_size, rounding_named(op, rounding)};
  check_shapes(op, x, scale, zero_point, options);
  return options;
}

inline bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sym_sizes() == b.sym_sizes() && a.device() == b.device();
}

inline void check_out(const char* op, const at::Tensor& x, const at::Tensor& out) {
  TORCH_CHECK_VALUE(same_kind(out, x), op, ": out is ", described(out), "; expected ", described(x), ", as x");
}

inline void check_grad(const at::Tensor& grad, const at::Tensor& x) {
  TORCH_CHECK_VALUE(same_kind(grad, x), "qsim::fake_quantize backward: grad is ", described(grad), "; expected ",
                    described(x), ", as x");
}

// Symbolic sizes and strides are not asked: that would guard on them, and the kernel that runs checks again.
inline bool may_fill_memory(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  const auto known_sizes = c10::asIntArrayRefSlowOpt(sizes), known_strides = c10::asIntArrayRefSlowOpt(strides);
  return known_sizes && known_strides ? fills_memory(*known_sizes, *known_strides) : sizes.size() == strides.size();
}

// strides: those of y, where the caller knows them.
inline void check_mask(const at::Tensor& grad, const at::Tensor& mask, at::OptionalSymIntArrayRef strides) {
  const char* op = "qsim::fake_quantize_mask_backward";
  TORCH_CHECK_TYPE(is_element(grad.scalar_type()), op, ": grad is ", described(grad),
                   "; expected float16, bfloat16, float32 or float64");
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kByte && mask.dim() == 1 && mask.device() == grad.device() &&
                        mask.sym_numel() == (grad.sym_numel() + 7) / 8,
                    op, ": mask is ", described(mask), "; expected Byte of shape [", (grad.sym_numel() + 7) / 8,
                    "] on ", grad.device(), ", one bit per element of grad with shape ", grad.sym_sizes());
  TORCH_CHECK_VALUE(!strides || may_fill_memory(grad.sym_sizes(), *strides), op, ": strides are ", *strides,
                    "; expected those of a dense tensor of shape ", grad.sym_sizes(),
                    ", in whose memory the mask was made");
}

inline void check_mask(const at::Tensor& grad, const at::Tensor& mask, at::OptionalIntArrayRef strides) {
  check_mask(grad, mask, strides ? at::OptionalSymIntArrayRef(c10::fromIntArrayRefSlow(*strides)) : std::nullopt);
}

inline at::Tensor empty_mask(const at::Tensor& x) {
  return at::empty_symint({(x.sym_numel() + 7) / 8}, x.options().dtype(at::kByte));
}

// Gradients of the parameters: contiguous, a learned zero point's in its own dtype.
inline at::Tensor empty_parameter_grad(const at::Tensor& scale) {
  return at::empty_like(scale, scale.options(), at::MemoryFormat::Contiguous);
}

}  // namespace qsim
