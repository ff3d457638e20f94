#include "observe.h"

#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/observe.h"

namespace qsim {
namespace {

void observe_cuda(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest, const at::Tensor& counts,
                  const at::Tensor& sketch, const at::Tensor& low_bits) {
  check_observe(x, lowest, highest, counts, sketch, low_bits);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor source = dense(x);
  check_launch(cuda::observe(source.const_data_ptr(), element_of(x), source.numel(), lowest.mutable_data_ptr<float>(),
                             highest.mutable_data_ptr<float>(), counts.mutable_data_ptr<std::int64_t>(),
                             {sketch.mutable_data_ptr<std::int64_t>(), low_bits.mutable_data_ptr<std::int32_t>()},
                             current_stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) { m.impl("observe_", observe_cuda); }
}  // namespace qsim
