#include "round_to_format.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "fake_quantize_layout.h"
#include "launch.h"
#include "qsim/cuda/round_to_format.h"

namespace qsim {
namespace {

using at::Tensor;
using Saturate = std::optional<bool>;

// x is dense.
struct FormatCall {
  FormatCall(const Tensor& x, const RoundToFormatOptions& options)
      : call{element_of(x), x.numel(), options.format, options.saturate, nullptr, {}} {
    if (!options.scale || x.numel() == 0) return;
    scale = in_memory_order(*options.scale, x, options.granularity);
    call.scale = scale.const_data_ptr();
    call.layout = layout_of(x, options.granularity);
  }

  Tensor scale;  // in memory order
  cuda::RoundToFormatCall call;
};

// x and y are dense with equal strides; y may be x. A defined mask covers the elements in memory order.
void round_dense(const Tensor& x, const Tensor& y, const Tensor& mask, const RoundToFormatOptions& options) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
  check_launch(cuda::round_to_format(FormatCall(x, options).call, x.const_data_ptr(), y.mutable_data_ptr(), bits,
                                     current_stream()));
}

Tensor fresh(const Tensor& x, const Tensor& mask, const RoundToFormatOptions& options) {
  const Tensor y = at::empty_like(x);
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

Tensor round_to_format_cuda(const Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                            OptionalInt axis, OptionalInt block_size) {
  return fresh(x, Tensor(), check_round_to_format(x, format, saturate, scale, axis, block_size));
}

Tensor& round_to_format_out_cuda(const Tensor& x, std::string_view format, Saturate saturate,
                                 const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size, Tensor& out) {
  const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
  check_out(x, out);
  into(x, out, Tensor(), options);
  return out;
}

Tensor& round_to_format_inplace_cuda(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                                     OptionalInt axis, OptionalInt block_size) {
  into(x, x, Tensor(), check_round_to_format(x, format, saturate, scale, axis, block_size));
  return x;
}

std::tuple<Tensor, Tensor> with_mask_cuda(const Tensor& x, std::string_view format, Saturate saturate,
                                          const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
  const Tensor mask = empty_mask(x);
  return {fresh(x, mask, options), mask};
}

Tensor with_mask_inplace_cuda(Tensor& x, std::string_view format, Saturate saturate, const OptionalTensor& scale,
                              OptionalInt axis, OptionalInt block_size) {
  const auto options = check_round_to_format(x, format, saturate, scale, axis, block_size);
  const Tensor mask = empty_mask(x);
  into(x, x, mask, options);
  return mask;
}

// x is dense; an undefined y is not written, otherwise it has the strides of x.
void count_dense(const Tensor& x, const Tensor& y, const Tensor& counts, const OptionalTensor& squares,
                 const RoundToFormatOptions& options) {
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor partial;
  if (squares) partial = at::empty({cuda::format_partials(x.numel()), 2}, squares->options());
  check_launch(cuda::count_format(
      FormatCall(x, options).call, x.const_data_ptr(), y.defined() ? y.mutable_data_ptr() : nullptr,
      counts.mutable_data_ptr<std::int64_t>(), squares ? squares->mutable_data_ptr<double>() : nullptr,
      squares ? static_cast<SquaredSums*>(partial.mutable_data_ptr()) : nullptr, current_stream()));
}

Tensor counted_cuda(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
                    Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  const auto options = check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
  const Tensor from = dense(x), y = at::empty_like(from);
  count_dense(from, y, counts, squares, options);
  return y;
}

void count_cuda(const Tensor& x, std::string_view format, const Tensor& counts, const OptionalTensor& squares,
                Saturate saturate, const OptionalTensor& scale, OptionalInt axis, OptionalInt block_size) {
  const auto options = check_counted(x, format, counts, squares, saturate, scale, axis, block_size);
  count_dense(dense(x), Tensor(), counts, squares, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("round_to_format", round_to_format_cuda);
  m.impl("round_to_format.out", round_to_format_out_cuda);
  m.impl("round_to_format_", round_to_format_inplace_cuda);
  m.impl("round_to_format_with_mask", with_mask_cuda);
  m.impl("round_to_format_with_mask_", with_mask_inplace_cuda);
  m.impl("round_to_format_counted", counted_cuda);
  m.impl("count_format_", count_cuda);
}
}  // namespace qsim
