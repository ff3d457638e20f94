// What the kernels of search_range_data check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "search_range.h"

namespace qsim {

// The ranges' shape: [] for the whole tensor, [C] along an axis, x's with ceil(n / block_size) there for blocks.
inline std::vector<std::int64_t> data_range_shape(const at::Tensor& x, std::optional<std::int64_t> axis,
                                                  std::optional<std::int64_t> block_size) {
  TORCH_CHECK_TYPE(c10::isFloatingType(x.scalar_type()) && x.element_size() >= 2, "qsim::search_range_data: x is ",
                   x.scalar_type(), "; expected float16, bfloat16, float32 or float64");
  TORCH_CHECK_VALUE(axis || !block_size, "qsim::search_range_data: block_size ", block_size.value_or(0),
                    " needs the axis that the blocks lie along");
  if (!axis) return {};
  TORCH_CHECK_VALUE(x.dim() > 0, "qsim::search_range_data: x has no dimensions; expected one for axis ", *axis);
  const std::int64_t dim = c10::maybe_wrap_dim(*axis, x.dim());
  if (!block_size) return {x.size(dim)};
  TORCH_CHECK_VALUE(*block_size > 0, "qsim::search_range_data: block_size is ", *block_size, "; expected at least 1");
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[dim] = (shape[dim] + *block_size - 1) / *block_size;
  return shape;
}

inline at::ScalarType data_range_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

using Ranges = std::tuple<at::Tensor, at::Tensor>;

inline Ranges empty_data_ranges(const at::Tensor& x, at::IntArrayRef shape) {
  const auto options = x.options().dtype(data_range_type(x));
  return {at::empty(shape, options), at::empty(shape, options)};
}

// x in the type of its ranges, as rows of `length` consecutive values, each cut into blocks of `block` (the last of a
// row may be short): one range per block, in order.
struct DataRows {
  at::Tensor values;
  std::int64_t length, block;
  Ranges ranges;                           // their blocks lie along the last dimension ...
  std::optional<std::int64_t> block_axis;  // ... and belong here

  std::int64_t blocks() const { return std::max<std::int64_t>((length + block - 1) / block, 1); }

  Ranges finished() const {
    const auto& [min, max] = ranges;
    if (!block_axis) return ranges;
    return {min.movedim(-1, *block_axis).contiguous(), max.movedim(-1, *block_axis).contiguous()};
  }
};

inline DataRows data_rows(const at::Tensor& x, std::optional<std::int64_t> axis,
                          std::optional<std::int64_t> block_size) {
  std::vector<std::int64_t> shape = data_range_shape(x, axis, block_size);
  at::Tensor values = x.to(data_range_type(x));
  std::int64_t length = x.numel();
  if (axis) {
    const std::int64_t dim = c10::maybe_wrap_dim(*axis, x.dim());
    values = values.movedim(dim, block_size ? -1 : 0);
    length = block_size ? x.size(dim) : x.numel() / std::max<std::int64_t>(x.size(dim), 1);
    if (block_size) std::rotate(shape.begin() + dim, shape.begin() + dim + 1, shape.end());
  }
  return {values.contiguous(), length, block_size.value_or(std::max<std::int64_t>(length, 1)),
          empty_data_ranges(x, shape), block_size ? axis : std::nullopt};
}

}  // namespace qsim
