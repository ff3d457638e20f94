#include "choose_qparams.h"

#include <torch/library.h>

namespace qsim {
namespace {

std::tuple<at::Tensor, at::Tensor> choose_qparams_meta(const at::Tensor& min, const at::Tensor& max,
                                                       std::int64_t quant_min, std::int64_t quant_max, bool symmetric,
                                                       double min_scale) {
  quant_grid(quant_min, quant_max, symmetric);
  check_min_scale(min_scale);
  return empty_qparams(min, max);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) { m.impl("choose_qparams", choose_qparams_meta); }
}  // namespace qsim
