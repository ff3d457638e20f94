// What the CPU, CUDA and Meta kernels of observe_range_ and observe_ check alike, and how memory maps to ranges.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "described.h"
#include "element.h"
#include "memory.h"
#include "qsim/finite_range.h"
#include "qsim/observe.h"

namespace qsim {

// Called with sizes that may be symbolic.
inline void check_state(const at::Tensor& x, const char* name, const at::Tensor& state, at::ScalarType dtype,
                        c10::SymIntArrayRef shape) {
  TORCH_CHECK_TYPE(state.scalar_type() == dtype, "qsim: ", name, " is ", described(state.scalar_type()), "; expected ",
                   dtype);
  TORCH_CHECK_VALUE(state.sym_sizes() == shape, "qsim: ", name, " has shape ", state.sym_sizes(), "; expected ", shape,
                    " for x of shape ", x.sym_sizes());
  TORCH_CHECK_VALUE(state.is_contiguous(), "qsim: ", name,
                    " is not contiguous; pass a whole buffer, not a view with gaps");
  TORCH_CHECK_VALUE(state.device() == x.device(), "qsim: ", name, " is on ", state.device(), " and x on ", x.device(),
                    "; move the state to x's device");
}

inline void check_range_state(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                              const at::Tensor& counts, std::optional<std::int64_t> axis,
                              std::optional<std::int64_t> block_size) {
  element_of(x);
  TORCH_CHECK_VALUE(axis.has_value() || !block_size.has_value(), "qsim: block_size ", *block_size,
                    " without axis; name the axis that is cut into blocks");
  TORCH_CHECK_VALUE(block_size.value_or(1) > 0, "qsim: block_size is ", *block_size, "; expected 1 or more");
  c10::SymDimVector shape;
  if (axis) {
    const auto a = static_cast<std::size_t>(wrapped_axis(x, *axis));
    const auto sizes = x.sym_sizes();
    if (block_size) {
      shape.assign(sizes.begin(), sizes.end());
      shape[a] = blocks_in(sizes[a], *block_size);
    } else {
      shape.push_back(sizes[a]);
    }
  }
  check_state(x, "lowest", lowest, at::kFloat, shape);
  check_state(x, "highest", highest, at::kFloat, shape);
  check_state(x, "counts", counts, at::kLong, c10::SymInt(4));
}

inline void check_observe_range(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                                const at::Tensor& counts, std::optional<std::int64_t> axis,
                                std::optional<std::int64_t> block_size) {
  check_range_state(x, lowest, highest, counts, axis, block_size);
  check_memory("qsim::observe_range_", {{"lowest", lowest}, {"highest", highest}, {"counts", counts}}, {{"x", x}});
}

inline void check_observe(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                          const at::Tensor& counts, const at::Tensor& sketch, const at::Tensor& low_bits) {
  check_range_state(x, lowest, highest, counts, {}, {});
  check_state(x, "sketch", sketch, at::kLong, c10::SymInt(kSketchBins));
  check_state(x, "low_bits", low_bits, at::kInt, {});
  check_memory(
      "qsim::observe_",
      {{"lowest", lowest}, {"highest", highest}, {"counts", counts}, {"sketch", sketch}, {"low_bits", low_bits}},
      {{"x", x}});
}

// x in memory order is [outer, ranges, inner]; with `block`, the middle axis is cut into blocks and each inner position
// of a block has a range of its own.
struct RangeLayout {
  std::int64_t outer, ranges, inner;
  std::int64_t block = 0;
};

// Of a tensor that is dense (contiguous when cut into blocks) and not empty.
inline RangeLayout range_layout(const at::Tensor& x, std::optional<std::int64_t> axis,
                                std::optional<std::int64_t> block_size) {
  if (!axis) return {x.numel(), 1, 1};
  const std::int64_t a = wrapped_axis(x, *axis), size = x.size(a);
  if (!block_size) {
    if (size == 1) return {x.numel(), 1, 1};
    const std::int64_t inner = x.stride(a);  // no gaps: the step along an axis is the size of what lies inside
    return {x.numel() / (size * inner), size, inner};
  }
  const std::int64_t inner = c10::multiply_integers(x.sizes().begin() + a + 1, x.sizes().end());
  if (inner == 1 && size % *block_size == 0) return {1, x.numel() / *block_size, *block_size};
  return {x.numel() / (size * inner), size, inner, std::min(*block_size, size)};
}

}  // namespace qsim
