// Running ranges after a batch, each with its scale and zero point. The bindings call it through
// running_range_kernels().
#include "qsim/observe_fake_quantize.h"

namespace qsim::cpu {

namespace {

void follow_all(const float* lowest, const float* highest, std::int64_t n, const RunningRule& rule,
                RunningRanges ranges) {
  for (std::int64_t i = 0; i < n; ++i) follow({lowest[i], highest[i]}, i, rule, ranges);
}

}  // namespace

namespace QSIM_LEVEL {
const RunningRangeKernels running_range_kernels = {follow_all};
}

}  // namespace qsim::cpu
