#include <torch/library.h>

#include "schema/tags.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def(
      "choose_qparams(Tensor min, Tensor max, int quant_min, int quant_max, bool symmetric=False, *, "
      "float min_scale=0.0) -> (Tensor scale, Tensor zero_point)",
      qsim::kAnyLayout);
}
