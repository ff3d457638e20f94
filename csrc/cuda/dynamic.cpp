// Three launches: ranges, scales, rounding. x is read twice and the result written once.
#include "dynamic.h"

#include <torch/library.h>

#include "launch.h"

namespace qsim {
namespace {

template <class Call>
at::Tensor composed(const at::Tensor& x, const Call& call) {
  const c10::cuda::CUDAGuard guard(x.device());
  return compose(x, call);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("fake_quantize_dynamic", integer_kernel<composed<IntegerCall>>);
  m.impl("round_to_format_dynamic", format_kernel<composed<FormatCall>>);
}
}  // namespace qsim
