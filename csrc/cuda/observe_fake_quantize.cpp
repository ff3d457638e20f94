#include "observe_fake_quantize.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "fake_quantize_call.h"
#include "qsim/cuda/observe_fake_quantize.h"

namespace qsim {
namespace {

using at::Tensor;

// The switches are read by the kernels: nothing here depends on what the device holds.
void observe(const RunningCall& call) {
  const Tensor source = call.block_size ? call.x.contiguous() : dense(call.x);
  const auto [outer, ranges, inner, block] = range_layout(source, call.axis, call.block_size);
  const cuda::Running running{byte_of(call.observing), call.rule(), call.ranges(),
                              call.counts.mutable_data_ptr<std::int64_t>()};
  const void* data = source.const_data_ptr();
  if (block > 0) {
    check_launch(cuda::follow_blocks(data, element_of(call.x), outer, ranges, inner, block, running, current_stream()));
  } else {
    const auto bytes = static_cast<std::int64_t>(cuda::follow_ranges_workspace_bytes(ranges));
    const Tensor workspace = at::empty({bytes}, source.options().dtype(at::kByte));
    check_launch(cuda::follow_ranges(data, element_of(call.x), outer, ranges, inner, running,
                                     workspace.mutable_data_ptr(), current_stream()));
  }
}

// mask: undefined, or one bit per element.
Tensor run(const RunningCall& call, const Tensor& mask) {
  const FakeQuantizeOptions options = call.check();
  const c10::cuda::CUDAGuard guard(call.x.device());
  const Tensor y = at::empty_like(call.x), from = call.x.is_non_overlapping_and_dense() ? call.x : y;
  if (call.x.numel() == 0) return y;
  if (from.is_same(y)) y.copy_(call.x);
  observe(call);
  CudaCall quantize(from, call.grid_scale(), call.zero_point, options);
  quantize.call.enabled = byte_of(call.quantizing);
  check_launch(cuda::fake_quantize(quantize.call, from.const_data_ptr(), y.mutable_data_ptr(),
                                   mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr, current_stream()));
  return y;
}

Tensor plain(const RunningCall& call) { return run(call, Tensor()); }

std::tuple<Tensor, Tensor> with_mask(const RunningCall& call) {
  const Tensor mask = empty_mask(call.x);
  return {run(call, mask), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("observe_fake_quantize", running_kernel<plain>);
  m.impl("observe_fake_quantize_with_mask", running_kernel<with_mask>);
}
}  // namespace qsim
