// Scales and zero points of ranges. The bindings call it through choose_qparams_kernels().
#include "qsim/choose_qparams.h"

namespace qsim::cpu {

namespace {

template <class T>
void run(const T* low, const T* high, std::int64_t n, QuantGrid grid, double min_scale, T* scale,
         std::int32_t* zero_point) {
  for (std::int64_t i = 0; i < n; ++i) {
    const QuantParams<T> params = choose_qparams<T>(low[i], high[i], grid, min_scale);
    scale[i] = params.scale;
    zero_point[i] = params.zero_point;
  }
}

}  // namespace

namespace QSIM_LEVEL {
const ChooseQparamsKernels choose_qparams_kernels = {run<float>, run<double>};
}

}  // namespace qsim::cpu
