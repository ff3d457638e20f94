#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "autograd/version.h"
#include "operator_named.h"

namespace qsim {
namespace {

void observe_versioned(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                       const at::Tensor& counts, const at::Tensor& sketch, const at::Tensor& low_bits) {
  static const auto op = operator_named<decltype(observe_versioned)>("qsim::observe_");
  check_versions(lowest, highest, counts, sketch, low_bits);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(x, lowest, highest, counts, sketch, low_bits);
  }
  bump_versions(lowest, highest, counts, sketch, low_bits);
}

}  // namespace

// Nothing is returned, so nothing can be differentiated; what is mutated gets a new version.
TORCH_LIBRARY_IMPL(qsim, Autograd, m) { m.impl("observe_", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(qsim, ADInplaceOrView, m) { m.impl("observe_", observe_versioned); }
}  // namespace qsim
