#include <torch/library.h>

#include "launch.h"
#include "observe.h"
#include "qsim/cuda/observe_range.h"

namespace qsim {
namespace {

void observe_range_cuda(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                        const at::Tensor& counts, std::optional<std::int64_t> axis,
                        std::optional<std::int64_t> block_size) {
  check_observe_range(x, lowest, highest, counts, axis, block_size);
  if (x.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor source = block_size ? x.contiguous() : dense(x);
  const auto [outer, ranges, inner, block] = range_layout(source, axis, block_size);
  auto *low = lowest.mutable_data_ptr<float>(), *high = highest.mutable_data_ptr<float>();
  auto* found = counts.mutable_data_ptr<std::int64_t>();
  const void* data = source.const_data_ptr();
  if (block > 0) {
    check_launch(
        cuda::observe_blocks(data, element_of(x), outer, ranges, inner, block, low, high, found, current_stream()));
  } else {
    check_launch(cuda::observe_range(data, element_of(x), outer, ranges, inner, low, high, found, current_stream()));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) { m.impl("observe_range_", observe_range_cuda); }
}  // namespace qsim
