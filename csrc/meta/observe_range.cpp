#include <torch/library.h>

#include "observe.h"

namespace qsim {
namespace {

void observe_range_meta(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                        const at::Tensor& counts, std::optional<std::int64_t> axis,
                        std::optional<std::int64_t> block_size) {
  check_observe_range(x, lowest, highest, counts, axis, block_size);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) { m.impl("observe_range_", observe_range_meta); }
}  // namespace qsim
