#include "observe.h"

#include <torch/library.h>

namespace qsim {
namespace {

void observe_meta(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest, const at::Tensor& counts,
                  const at::Tensor& sketch, const at::Tensor& low_bits) {
  check_observe(x, lowest, highest, counts, sketch, low_bits);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) { m.impl("observe_", observe_meta); }
}  // namespace qsim
