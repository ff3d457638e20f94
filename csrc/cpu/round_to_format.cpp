#include "round_to_format.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <tuple>
#include <vector>

#include "cpu/observe_state.h"
#include "empty_result.h"
#include "fake_quantize_grids.h"

namespace qsim {
namespace {

using at::Tensor;
using Saturate = std::optional<bool>;

// The scales of a dense x in memory order.
struct Scales {
  Scales(const Tensor& x, const RoundToFormatOptions& options) {
    if (!options.scale || x.numel() == 0) return;
    layout = layout_of(x, options.granularity);
    scale = in_memory_order(*options.scale, x, options.granularity);
    repeat(x.numel());
  }

  // Where channels alternate every few elements their scales are written out, several rows if they are short, so that
  // a run is long enough for the vector loops.
  void repeat(std::int64_t n) {
    constexpr std::int64_t kLongRun = 32, kLongRow = 256, kWorthIt = 4;
    const std::int64_t period = layout.width * layout.run;
    if (layout.width == 1 || layout.segment != n || layout.run >= kLongRun || n < kWorthIt * period) return;
    const std::int64_t rows = std::max<std::int64_t>(1, std::min(kLongRow / period, n / period));
    scale = scale.reshape({1, layout.width, 1}).expand({rows, layout.width, layout.run}).contiguous();
    layout.width = rows * period;
    layout.run = 1;
  }

  Tensor scale;
  Layout layout = {};
};

// Calls run(element, kernels, scales, format) for the type of x.
template <class Run>
void for_type_of(const Tensor& x, const RoundToFormatOptions& options, Run run) {
  const Scales scales(x, options);
  for_element_type(x.scalar_type(), cpu::round_to_format_kernels(), [&](auto element, const auto& kernels) {
    using T = decltype(element);
    using A = arithmetic_t<T>;
    cpu::FormatScales<A> table;
    if (scales.scale.defined()) table = {data<A>(scales.scale), scales.layout};
    const auto format = table.scale == nullptr ? format_in<T>(options.format, options.saturate)
                                               : format_in<A>(options.format, options.saturate);
    run(element, kernels, table, format);
  });
}

// x and y are dense with equal strides; y may be x. A defined mask covers the elements in memory order.
void round_dense(const Tensor& x, const Tensor& y, const Tensor& mask, const RoundToFormatOptions& options) {
  if (x.numel() == 0) return;
  auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
  for_type_of(x, options, [&](auto element, const auto& kernels, const auto& scales, const auto& format) {
    using T = decltype(element);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
      if (bits != nullptr) {
        kernels.with_mask(from, to, bits, begin, end, scales, format);
      } else {
        kernels.plain(from, to, begin, end, scales, format);
      }
    });
  });
}

Tensor fresh(const Tensor& x, const Tensor& mask, const RoundToFormatOptions& options) {
  const Tensor y = empty_result(x);
  if (!x.is_non_overlapping_and_dense()) y.copy_(x);
  round_dense(x.is_non_overlapping_and_dense() ? x : y, y, mask, options);
  return y;
}

void into(const Tensor& x, const Tensor& out, const Tensor& mask, const RoundToFormatOptions& options) {
  at::assert_no_internal_overlap(out);
  at::assert_no_partial_overlap(out, x);
  if (x.is_non_overlapping_and_dense() && out.strides() == x.strides()) {
    round_dense(x, out, mask, options);
  } else {
    out.copy_(fresh(x, mask, options));
  }
}

Tensor round_to_format_cpu(const Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                           OptionalInt axis, OptionalInt block_size) {
  return fresh(x, Tensor(), check_round_to_format(x, format, saturate, scale, axis, block_size));
}

Tensor& round_to_format_out_cpu(const Tensor& x, std::string_view format, Saturate saturate,
                                const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size, Tensor& out) {
  const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
  check_out(x, out);
  into(x, out, Tensor(), options);
  return out;
}

Tensor& round_to_format_inplace_cpu(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                                    OptionalInt axis, OptionalInt block_size) {
  into(x, x, Tensor(), check_round_to_format(x, format, saturate, scale, axis, block_size));
  return x;
}

std::tuple<Tensor, Tensor> with_mask_cpu(const Tensor& x, std::string_view format, Saturate saturate,
                                         const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
  const Tensor mask = empty_mask(x);
  return {fresh(x, mask, options), mask};
}

Tensor with_mask_inplace_cpu(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                             OptionalInt axis, OptionalInt block_size) {
  const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
  const Tensor mask = empty_mask(x);
  into(x, x, mask, options);
  return mask;
}

// x is dense; an undefined y is not written, otherwise it has the strides of x. Sums are taken over chunks of kGrain
// elements and joined in order: threads change nothing.
void count_dense(const Tensor& x, const Tensor& y, const Tensor& counts, const OptionalTensor& squares,
                 const RoundToFormatOptions& options) {
  const std::int64_t n = x.numel(), chunks = (n + kGrain - 1) / kGrain;
  FormatCounts total;
  std::vector<SquaredSums> sums(squares ? static_cast<std::size_t>(chunks) : 0);
  std::mutex merging;
  for_type_of(x, options, [&](auto element, const auto& kernels, const auto& scales, const auto& format) {
    using T = decltype(element);
    const T* from = data<T>(x);
    T* to = y.defined() ? mutable_data<T>(y) : nullptr;
    at::parallel_for(0, chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      FormatCounts found;
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        const std::int64_t at = chunk * kGrain;
        kernels.counted(from, to, at, std::min(at + kGrain, n), scales, format, found,
                        squares ? &sums[static_cast<std::size_t>(chunk)] : nullptr);
      }
      const std::lock_guard lock(merging);
      total.merge(found);
    });
  });
  auto* counter = counts.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t found : {n, total.nans, total.infs, total.overflows, total.underflows, total.subnormals}) {
    *counter++ += found;
  }
  if (!squares) return;
  SquaredSums sum;
  for (const SquaredSums& part : sums) sum.merge(part);
  auto* to = squares->mutable_data_ptr<double>();
  to[0] += sum.error;
  to[1] += sum.signal;
}

Tensor counted_cpu(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
                   Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  const auto options = check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
  const Tensor from = dense(x), y = empty_result(from);
  count_dense(from, y, counts, squares, options);
  return y;
}

void count_cpu(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
               Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  const auto options = check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
  count_dense(dense(x), Tensor(), counts, squares, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("round_to_format", round_to_format_cpu);
  m.impl("round_to_format.out", round_to_format_out_cpu);
  m.impl("round_to_format_", round_to_format_inplace_cpu);
  m.impl("round_to_format_with_mask", with_mask_cpu);
  m.impl("round_to_format_with_mask_", with_mask_inplace_cpu);
  m.impl("round_to_format_counted", counted_cpu);
  m.impl("count_format_", count_cpu);
}
}  // namespace qsim
