#include "soft_round.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

namespace qsim {
namespace {

using at::Tensor;

void soft_round_cpu(Tensor& variable, Tensor& mean, Tensor& square, Tensor& errors, const Tensor& target,
                    const Tensor& step, const Tensor& low, const Tensor& high, std::int64_t at, double rate,
                    double weight, double exponent) {
  const SoftRoundCall call{variable, mean, square, errors, target, step, low, high};
  call.check(at);
  if (variable.numel() == 0) return;
  const SoftRounding how = soft_rounding(at, rate, weight, exponent);
  const auto kernel = cpu::soft_round_kernels().round;
  constexpr std::int64_t kGrain = 1 << 12;  // numbers that are worth a thread
  const std::int64_t rows = std::max<std::int64_t>(1, kGrain / variable.size(2));
  at::parallel_for(0, call.rows(), rows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) kernel(call.row(i), how);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim_restoration, CPU, m) { m.impl("soft_round_", soft_round_cpu); }
}  // namespace qsim
