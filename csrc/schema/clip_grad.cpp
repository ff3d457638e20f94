#include <torch/library.h>

// clip_grad_ is the other two in one call; they are separate for gradients that live on several devices, whose power
// sums are joined in between.
TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def(
      "clip_grad_(Tensor(a!)[] grads, float max_norm, *, float norm_type=2.0, str nonfinite=\"skip\") "
      "-> (Tensor total_norm, Tensor nonfinite)");
  m.def("grad_power_sum(Tensor[] grads, *, float norm_type=2.0) -> (Tensor power_sum, Tensor nonfinite)");
  m.def(
      "scale_grad_(Tensor(a!)[] grads, Tensor power_sum, Tensor counts, float max_norm, *, float norm_type=2.0, "
      "str nonfinite=\"skip\") -> Tensor total_norm");
}
