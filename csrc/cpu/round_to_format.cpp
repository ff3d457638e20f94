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

// Calls run(element, kernels, format) for the type of x.
template <class Run>
void for_type_of(const Tensor& x, const RoundToFormatOptions& options, Run run) {
  for_element_type(x.scalar_type(), cpu::round_to_format_kernels(), [&](auto element, const auto& kernels) {
    run(element, kernels, format_in<decltype(element)>(options.format, options.saturate));
  });
}

// x and y are dense with equal strides; y may be x. A defined mask covers the elements in memory order.
void round_dense(const Tensor& x, const Tensor& y, const Tensor& mask, const RoundToFormatOptions& options) {
  if (x.numel() == 0) return;
  auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
  for_type_of(x, options, [&](auto element, const auto& kernels, const auto& format) {
    using T = decltype(element);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    in_parallel(x.numel(), [&](std::int64_t begin, std::int64_t end) {
      if (bits != nullptr) {
        kernels.with_mask(from + begin, to + begin, bits + begin / 8, end - begin, format);
      } else {
        kernels.plain(from + begin, to + begin, end - begin, format);
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

Tensor round_to_format_cpu(const Tensor& x, std::string_view format, Saturate saturate) {
  return fresh(x, Tensor(), check_round_to_format(x, format, saturate));
}

Tensor& round_to_format_out_cpu(const Tensor& x, std::string_view format, Saturate saturate, Tensor& out) {
  const auto options = check_round_to_format(x, format, saturate);
  check_out(x, out);
  into(x, out, Tensor(), options);
  return out;
}

Tensor& round_to_format_inplace_cpu(Tensor& x, std::string_view format, Saturate saturate) {
  into(x, x, Tensor(), check_round_to_format(x, format, saturate));
  return x;
}

std::tuple<Tensor, Tensor> with_mask_cpu(const Tensor& x, std::string_view format, Saturate saturate) {
  const auto options = check_round_to_format(x, format, saturate);
  const Tensor mask = empty_mask(x);
  return {fresh(x, mask, options), mask};
}

Tensor with_mask_inplace_cpu(Tensor& x, std::string_view format, Saturate saturate) {
  const auto options = check_round_to_format(x, format, saturate);
  const Tensor mask = empty_mask(x);
  into(x, x, mask, options);
  return mask;
}

// x is dense; an undefined y is not written, otherwise it has the strides of x. Sums are taken over chunks of kGrain
// elements and joined in order: threads change nothing.
void count_dense(const Tensor& x, const Tensor& y, const Tensor& counts, const std::optional<Tensor>& squares,
                 const RoundToFormatOptions& options) {
  const std::int64_t n = x.numel(), chunks = (n + kGrain - 1) / kGrain;
  FormatCounts total;
  std::vector<SquaredSums> sums(squares ? static_cast<std::size_t>(chunks) : 0);
  std::mutex merging;
  for_type_of(x, options, [&](auto element, const auto& kernels, const auto& format) {
    using T = decltype(element);
    const T* from = data<T>(x);
    T* to = y.defined() ? mutable_data<T>(y) : nullptr;
    at::parallel_for(0, chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      FormatCounts found;
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        const std::int64_t at = chunk * kGrain;
        kernels.counted(from + at, to == nullptr ? nullptr : to + at, std::min(kGrain, n - at), format, found,
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

Tensor counted_cpu(const Tensor& x, std::string_view format, const Tensor& counts, const std::optional<Tensor>& squares,
                   Saturate saturate) {
  const auto options = check_counted(x, format, saturate, counts, squares);
  const Tensor from = dense(x), y = empty_result(from);
  count_dense(from, y, counts, squares, options);
  return y;
}

void count_cpu(const Tensor& x, std::string_view format, const Tensor& counts, const std::optional<Tensor>& squares,
               Saturate saturate) {
  const auto options = check_counted(x, format, saturate, counts, squares);
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
