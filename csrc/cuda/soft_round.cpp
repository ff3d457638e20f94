#include "soft_round.h"

#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/soft_round.h"

namespace qsim {
namespace {

using at::Tensor;

void soft_round_cuda(Tensor& variable, Tensor& mean, Tensor& square, Tensor& errors, const Tensor& target,
                     const Tensor& step, const Tensor& low, const Tensor& high, std::int64_t at, double rate,
                     double weight, double exponent) {
  const SoftRoundCall call{variable, mean, square, errors, target, step, low, high};
  call.check(at);
  if (variable.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(variable.device());
  check_launch(cuda::soft_round(call.rows(), call.row(0), soft_rounding(at, rate, weight, exponent), current_stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim_restoration, CUDA, m) { m.impl("soft_round_", soft_round_cuda); }
}  // namespace qsim
