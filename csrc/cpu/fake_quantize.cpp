#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include <tuple>

#include "empty_result.h"
#include "fake_quantize_grids.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

// x and y are dense with equal strides; y may be x.
void run_forward(const Tensor& x, const Tensor& y, const Tensor& scale, const Tensor& zero_point,
                 const FakeQuantizeOptions& options) {
  if (x.numel() == 0) return;
  for_element_type(x.scalar_type(), cpu::fake_quantize_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    using A = arithmetic_t<T>;
    const GridTable<A> table(x, scale, zero_point, options, typename GridTable<A>::ForValues());
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
      table.for_grids(begin, end, [&](std::int64_t offset, std::int64_t first, std::int64_t last, const auto& grids) {
        kernels.forward(from + offset, to + offset, first, last, grids, table.layout, options.rounding);
      });
    });
  });
}

Tensor fake_quantize_cpu(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                         std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  const Tensor y = empty_result(x);
  if (x.is_non_overlapping_and_dense()) {
    run_forward(x, y, scale, zero_point, options);
  } else {
    y.copy_(x);
    run_forward(y, y, scale, zero_point, options);
  }
  return y;
}

Tensor& fake_quantize_out_cpu(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                              std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding, double,
                              Tensor& out) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  check_out(x, out);
  at::assert_no_internal_overlap(out);
  at::assert_no_partial_overlap(out, x);
  if (x.is_non_overlapping_and_dense() && out.strides() == x.strides()) {
    run_forward(x, out, scale, zero_point, options);
  } else {
    const Tensor y = empty_result(x).copy_(x);
    run_forward(y, y, scale, zero_point, options);
    out.copy_(y);
  }
  return out;
}

Tensor& fake_quantize_inplace_cpu(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                                  std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding,
                                  double grad_factor) {
  return fake_quantize_out_cpu(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding, grad_factor, x);
}

// As run_forward; the mask covers the elements in the memory order of x.
Tensor run_with_mask(const Tensor& x, const Tensor& y, const Tensor& scale, const Tensor& zero_point,
                     const FakeQuantizeOptions& options) {
  const Tensor mask = empty_mask(x);
  if (x.numel() == 0) return mask;
  for_element_type(x.scalar_type(), cpu::fake_quantize_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    const GridTable<arithmetic_t<T>> table(x, scale, zero_point, options);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    auto* bits = mask.mutable_data_ptr<std::uint8_t>();
    in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
      kernels.with_mask(from, to, bits, begin, end, table.grids, table.layout, options.rounding);
    });
  });
  return mask;
}

std::tuple<Tensor, Tensor> with_mask_cpu(const Tensor& x, const Tensor& scale, const Tensor& zero_point,
                                         std::int64_t quant_min, std::int64_t quant_max, Axis axis, Axis block_size,
                                         std::string_view rounding) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  const Tensor y = empty_result(x);
  if (!x.is_non_overlapping_and_dense()) y.copy_(x);
  const Tensor& from = x.is_non_overlapping_and_dense() ? x : y;
  return {y, run_with_mask(from, y, scale, zero_point, options)};
}

Tensor with_mask_inplace_cpu(Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                             std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding) {
  const auto options = check_fake_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  at::assert_no_internal_overlap(x);
  if (x.is_non_overlapping_and_dense()) return run_with_mask(x, x, scale, zero_point, options);
  const Tensor y = empty_result(x).copy_(x), mask = run_with_mask(y, y, scale, zero_point, options);
  x.copy_(y);
  return mask;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("fake_quantize", fake_quantize_cpu);
  m.impl("fake_quantize.out", fake_quantize_out_cpu);
  m.impl("fake_quantize_", fake_quantize_inplace_cpu);
  m.impl("fake_quantize_with_mask", with_mask_cpu);
  m.impl("fake_quantize_with_mask_", with_mask_inplace_cpu);
}
}  // namespace qsim
