#include "choose_qparams.h"

#include <torch/library.h>

#include "cpu/subnormals.h"

namespace qsim {
namespace {

std::tuple<at::Tensor, at::Tensor> choose_qparams_cpu(const at::Tensor& min, const at::Tensor& max,
                                                      std::int64_t quant_min, std::int64_t quant_max, bool symmetric,
                                                      double min_scale) {
  const KeepSubnormals guard;
  const QuantGrid grid = quant_grid(quant_min, quant_max, symmetric);
  check_min_scale(min_scale);
  auto [scale, zero_point] = empty_qparams(min, max);
  const at::Tensor low = min.contiguous(), high = max.contiguous();
  const auto& kernels = cpu::choose_qparams_kernels();
  auto* zero = zero_point.mutable_data_ptr<std::int32_t>();
  if (min.scalar_type() == at::kFloat) {
    kernels.f32(low.const_data_ptr<float>(), high.const_data_ptr<float>(), low.numel(), grid, min_scale,
                scale.mutable_data_ptr<float>(), zero);
  } else {
    kernels.f64(low.const_data_ptr<double>(), high.const_data_ptr<double>(), low.numel(), grid, min_scale,
                scale.mutable_data_ptr<double>(), zero);
  }
  return {scale, zero_point};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("choose_qparams", choose_qparams_cpu); }
}  // namespace qsim
