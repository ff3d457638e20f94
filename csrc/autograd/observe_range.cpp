#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "autograd/version.h"
#include "operator_named.h"

namespace qsim {
namespace {

void observe_range_versioned(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                             const at::Tensor& counts, std::optional<std::int64_t> axis,
                             std::optional<std::int64_t> block_size) {
  static const auto op = operator_named<decltype(observe_range_versioned)>("qsim::observe_range_");
  check_versions(lowest, highest, counts);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(x, lowest, highest, counts, axis, block_size);
  }
  bump_versions(lowest, highest, counts);
}

}  // namespace

// Nothing is returned, so nothing can be differentiated; what is mutated gets a new version.
TORCH_LIBRARY_IMPL(qsim, Autograd, m) { m.impl("observe_range_", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(qsim, ADInplaceOrView, m) { m.impl("observe_range_", observe_range_versioned); }
}  // namespace qsim
