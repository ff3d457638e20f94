// From shapes and strides to the Layout in which the kernels of fake_quantize walk memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <numeric>

#include "fake_quantize.h"

namespace qsim {

inline at::Tensor with_strides(const at::Tensor& x, at::IntArrayRef strides) {
  return x.strides() == strides ? x : at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
}

inline bool is_per_tensor(const at::Tensor& x, const FakeQuantizeOptions& options) {
  return !options.axis || (!options.block_size && x.size(*options.axis) == 1);
}

// x is dense and not empty.
inline Layout layout_of(const at::Tensor& x, const FakeQuantizeOptions& options) {
  const std::int64_t n = x.numel();
  if (is_per_tensor(x, options)) return {n, n, 1, n};
  const std::int64_t length = x.size(*options.axis);
  const std::int64_t inner = length == 1 ? n : x.stride(*options.axis);  // of a single element the stride is arbitrary
  if (options.block_size) {
    const std::int64_t rows = std::min(*options.block_size, length);
    return {length * inner, rows * inner, inner, 1};
  }
  if (length * inner == n) return {n, inner, 1, inner};
  return {n, n, length, inner};
}

// The dimensions of a dense tensor from the slowest to the fastest in memory.
inline c10::SmallVector<std::int64_t, 6> memory_order(const at::Tensor& x) {
  c10::SmallVector<std::int64_t, 6> order(x.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return x.stride(a) > x.stride(b); });
  return order;
}

// Block scales (and zero points) in the order in which x meets them in memory.
inline at::Tensor in_memory_order(const at::Tensor& parameters, const at::Tensor& x,
                                  const FakeQuantizeOptions& options) {
  if (!options.block_size || x.is_contiguous()) return parameters.contiguous();
  return parameters.permute(memory_order(x)).contiguous();
}

// The inverse, for gradients of parameters that were computed in memory order.
inline at::Tensor from_memory_order(const at::Tensor& values, const at::Tensor& x, const FakeQuantizeOptions& options) {
  if (!options.block_size || x.is_contiguous()) return values;
  const auto order = memory_order(x);
  c10::SmallVector<std::int64_t, 6> inverse(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) inverse[order[i]] = static_cast<std::int64_t>(i);
  return values.permute(inverse).contiguous();
}

// Sums are cut at places that depend on sizes alone: whole rows and about kSlice elements, and never so fine that the
// partial sums of a table outweigh what they sum.
inline Slices slices_of(const Layout& layout) {
  constexpr std::int64_t kSlice = 32768, kRowsPerSum = 32;
  if (layout.width == 1) {
    const std::int64_t length = std::min(kSlice, layout.segment);
    return {length, (layout.segment + length - 1) / length};
  }
  const std::int64_t row = layout.width * layout.run;
  const std::int64_t rows = std::max((kSlice + row - 1) / row, (kRowsPerSum + layout.run - 1) / layout.run);
  return {rows * row, (layout.segment + rows * row - 1) / (rows * row)};
}

}  // namespace qsim
