#include "choose_qparams.h"

#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/choose_qparams.h"

namespace qsim {
namespace {

std::tuple<at::Tensor, at::Tensor> choose_qparams_cuda(const at::Tensor& min, const at::Tensor& max,
                                                       std::int64_t quant_min, std::int64_t quant_max, bool symmetric,
                                                       double min_scale) {
  const QuantGrid grid = quant_grid(quant_min, quant_max, symmetric);
  check_min_scale(min_scale);
  const c10::cuda::CUDAGuard guard(min.device());
  auto [scale, zero_point] = empty_qparams(min, max);
  const at::Tensor low = min.contiguous(), high = max.contiguous();
  TORCH_CHECK_VALUE(low.numel() <= INT32_MAX, "qsim::choose_qparams: ", low.numel(),
                    " ranges; expected fewer than 2^31");
  const int n = static_cast<int>(low.numel());
  auto* zero = zero_point.mutable_data_ptr<std::int32_t>();
  if (min.scalar_type() == at::kFloat) {
    check_launch(cuda::choose_qparams(low.const_data_ptr<float>(), high.const_data_ptr<float>(), n, grid, min_scale,
                                      scale.mutable_data_ptr<float>(), zero, current_stream()));
  } else {
    check_launch(cuda::choose_qparams(low.const_data_ptr<double>(), high.const_data_ptr<double>(), n, grid, min_scale,
                                      scale.mutable_data_ptr<double>(), zero, current_stream()));
  }
  return {scale, zero_point};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) { m.impl("choose_qparams", choose_qparams_cuda); }
}  // namespace qsim
