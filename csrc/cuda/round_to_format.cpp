#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "launch.h"
#include "qsim/cuda/round_to_format.h"
#include "round_to_format_operators.h"

namespace qsim {
namespace {

using at::Tensor;

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

struct Cuda {
  static Tensor empty(const Tensor& x) { return at::empty_like(x); }
  static Tensor mask(const Tensor& x) { return empty_mask(x); }

  static void round(const Tensor& x, const Tensor& y, const Tensor& mask, const RoundToFormatOptions& options) {
    const c10::cuda::CUDAGuard guard(x.device());
    auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
    check_launch(cuda::round_to_format(FormatCall(x, options).call, x.const_data_ptr(), y.mutable_data_ptr(), bits,
                                       current_stream()));
  }

  static void count(const Tensor& x, const Tensor& y, const Tensor& counts, const OptionalTensor& squares,
                    const RoundToFormatOptions& options) {
    const c10::cuda::CUDAGuard guard(x.device());
    Tensor partial;
    if (squares) partial = at::empty({cuda::format_partials(x.numel()), 2}, squares->options());
    check_launch(cuda::count_format(
        FormatCall(x, options).call, x.const_data_ptr(), y.defined() ? y.mutable_data_ptr() : nullptr,
        counts.mutable_data_ptr<std::int64_t>(), squares ? squares->mutable_data_ptr<double>() : nullptr,
        squares ? static_cast<SquaredSums*>(partial.mutable_data_ptr()) : nullptr, current_stream()));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) { RoundToFormatOperators<Cuda>::implement(m); }
}  // namespace qsim
