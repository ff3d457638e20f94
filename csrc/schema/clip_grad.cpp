#include <torch/library.h>

#include "schema/tags.h"

// clip_grad_ is the other two in one call; they are separate for gradients that live on several devices, whose powers
// are joined in between, and for those who ask for the norm of each gradient.
TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def(
      "clip_grad_(Tensor(a!)[] grads, float max_norm, *, float norm_type=2.0, str nonfinite=\"skip\") "
      "-> (Tensor total_norm, Tensor nonfinite)",
      qsim::kExactLayout);
  m.def("grad_power_sum(Tensor[] grads, *, float norm_type=2.0) -> (Tensor powers, Tensor nonfinite)",
        qsim::kExactLayout);
  m.def(
      "scale_grad_(Tensor(a!)[] grads, Tensor powers, Tensor counts, float max_norm, *, float norm_type=2.0, "
      "str nonfinite=\"skip\") -> Tensor total_norm",
      qsim::kExactLayout);
}
