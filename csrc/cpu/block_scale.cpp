#include "block_scale.h"

#include <torch/library.h>

#include <algorithm>

#include "cpu/subnormals.h"

namespace qsim {
namespace {

// Of finite ranges: one that is not has no scale, and no say in those of others.
float magnitude_of_all(const float* low, const float* high, std::int64_t n) {
  float magnitude = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float of_range = std::max(-low[i], high[i]);
    if (low[i] <= high[i] && is_finite(of_range)) magnitude = std::max(magnitude, of_range);
  }
  return magnitude;
}

at::Tensor choose_block_scale_cpu(const at::Tensor& lowest, const at::Tensor& highest, std::string_view element,
                                  std::string_view scale_format, std::string_view scale_rounding) {
  const KeepSubnormals guard;
  const BlockScaleRule rule = check_block_scale(lowest, highest, element, scale_format, scale_rounding);
  const at::Tensor scale = empty_block_scale(lowest), low = lowest.contiguous(), high = highest.contiguous();
  const auto *lows = low.const_data_ptr<float>(), *highs = high.const_data_ptr<float>();
  const std::int64_t n = scale.numel();
  cpu::block_scale_kernels().run(lows, highs, n, rule, magnitude_of_all(lows, highs, n),
                                 scale.mutable_data_ptr<float>());
  return scale;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("choose_block_scale", choose_block_scale_cpu); }
}  // namespace qsim
