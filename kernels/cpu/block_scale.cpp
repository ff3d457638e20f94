// Scales of blocks from their ranges. The bindings call it through block_scale_kernels().
#include "qsim/block_scale.h"

namespace qsim::cpu {

namespace {

void run(const float* low, const float* high, std::int64_t n, const BlockScaleRule& rule, float magnitude,
         float* scale) {
  const float of_tensor = scale_of_tensor(magnitude, rule);
  for (std::int64_t i = 0; i < n; ++i) scale[i] = block_scale({low[i], high[i]}, rule, of_tensor);
}

}  // namespace

namespace QSIM_LEVEL {
const BlockScaleKernels block_scale_kernels = {run};
}

}  // namespace qsim::cpu
