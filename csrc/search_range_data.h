// What the kernels of search_range_data and search_range_weights check and allocate alike.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "element.h"
#include "search_range.h"

namespace qsim {

// The ranges' shape: [] for the whole tensor, [C] along an axis, x's with ceil(n / block_size) there for blocks.
inline std::vector<std::int64_t> data_range_shape(const at::Tensor& x, std::optional<std::int64_t> axis,
                                                  std::optional<std::int64_t> block_size) {
  element_of(x);
  TORCH_CHECK_VALUE(axis || !block_size, "qsim::search_range_data: block_size ", block_size.value_or(0),
                    " needs the axis that the blocks lie along");
  if (!axis) return {};
  TORCH_CHECK_VALUE(x.dim() > 0, "qsim::search_range_data: x has no dimensions; expected one for axis ", *axis);
  const std::int64_t dim = c10::maybe_wrap_dim(*axis, x.dim());
  if (!block_size) return {x.size(dim)};
  TORCH_CHECK_VALUE(*block_size > 0, "qsim::search_range_data: block_size is ", *block_size, "; expected at least 1");
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[dim] = blocks_in(shape[dim], *block_size);
  return shape;
}

inline at::ScalarType data_range_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

using Ranges = std::tuple<at::Tensor, at::Tensor>;
using RangeLists = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>>;

inline Ranges empty_data_ranges(const at::Tensor& x, at::IntArrayRef shape) {
  const auto options = x.options().dtype(data_range_type(x));
  return {at::empty(shape, options), at::empty(shape, options)};
}

// x as rows of `length` consecutive values, each cut into blocks of `block` (the last of a row may be short): one range
// per block, in order.
struct DataRows {
  at::Tensor values;
  RangeSearch search;
  std::int64_t length, block;
  Ranges ranges;                           // their blocks lie along the last dimension ...
  std::optional<std::int64_t> block_axis;  // ... and belong here

  std::int64_t blocks() const { return std::max<std::int64_t>((length + block - 1) / block, 1); }

  // The values of range i.
  std::int64_t start(std::int64_t i) const { return i / blocks() * length + i % blocks() * block; }
  std::int64_t size(std::int64_t i) const { return std::min(block, length - i % blocks() * block); }

  // The first range that starts at value number `offset` or later.
  std::int64_t first_from(std::int64_t offset) const {
    return length == 0 ? 0 : offset / length * blocks() + (offset % length + block - 1) / block;
  }

  Ranges finished() const {
    const auto& [min, max] = ranges;
    if (!block_axis) return ranges;
    return {min.movedim(-1, *block_axis).contiguous(), max.movedim(-1, *block_axis).contiguous()};
  }
};

inline DataRows data_rows(const at::Tensor& x, std::optional<std::int64_t> axis, std::optional<std::int64_t> block_size,
                          const RangeSearch& search) {
  std::vector<std::int64_t> shape = data_range_shape(x, axis, block_size);
  at::Tensor values = x;
  std::int64_t length = x.numel();
  if (axis) {
    const std::int64_t dim = c10::maybe_wrap_dim(*axis, x.dim());
    values = values.movedim(dim, block_size ? -1 : 0);
    length = block_size ? x.size(dim) : x.numel() / std::max<std::int64_t>(x.size(dim), 1);
    if (block_size) std::rotate(shape.begin() + dim, shape.begin() + dim + 1, shape.end());
  }
  DataRows rows{values.contiguous(),
                search,
                length,
                std::clamp<std::int64_t>(block_size.value_or(length), 1, std::max<std::int64_t>(length, 1)),
                empty_data_ranges(x, shape),
                block_size ? axis : std::nullopt};
  if (x.numel() == 0) {
    std::get<0>(rows.ranges).fill_(INFINITY);
    std::get<1>(rows.ranges).fill_(-INFINITY);
  }
  return rows;
}

// How each of several tensors is to be searched.
struct WeightSearches {
  at::TensorList weights;
  at::IntArrayRef quant_min, quant_max;
  const c10::List<bool>& symmetric;
  const c10::List<std::optional<std::int64_t>>&axis, &block_size;
  std::string_view method;
  double percentile, gamma;

  void check() const {
    const std::size_t n = weights.size();
    TORCH_CHECK_VALUE(quant_min.size() == n && quant_max.size() == n && symmetric.size() == n && axis.size() == n &&
                          block_size.size() == n,
                      "qsim::search_range_weights: got ", n, " weights, ", quant_min.size(), " quant_min, ",
                      quant_max.size(), " quant_max, ", symmetric.size(), " symmetric, ", axis.size(), " axis and ",
                      block_size.size(), " block_size; expected one of each per weight");
    for (const at::Tensor& weight : weights) {
      TORCH_CHECK_VALUE(weight.device() == weights[0].device(), "qsim::search_range_weights: weights are on ",
                        weights[0].device(), " and ", weight.device(), "; expected one device a call");
    }
  }

  RangeSearch search(std::size_t i) const {
    return range_search(quant_min[i], quant_max[i], symmetric[i], method, percentile, gamma);
  }

  std::vector<DataRows> rows() const {
    check();
    std::vector<DataRows> found;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      found.push_back(data_rows(weights[i], axis[i], block_size[i], search(i)));
    }
    return found;
  }
};

inline RangeLists finished(const std::vector<DataRows>& searched) {
  RangeLists lists;
  for (const DataRows& rows : searched) {
    auto [min, max] = rows.finished();
    std::get<0>(lists).push_back(std::move(min));
    std::get<1>(lists).push_back(std::move(max));
  }
  return lists;
}

}  // namespace qsim
