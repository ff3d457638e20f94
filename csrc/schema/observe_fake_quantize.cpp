#include <torch/library.h>

#include <string>

#include "schema/tags.h"

// The variant with the mask exists for the Autograd kernel.
TORCH_LIBRARY_FRAGMENT(qsim, m) {
  const std::string arguments =
      "(Tensor x, Tensor observing, Tensor quantizing, Tensor(a!) lowest, Tensor(b!) highest, Tensor(c!) counts, "
      "Tensor(d!) scale, Tensor(e!) zero_point, int quant_min, int quant_max, *, float averaging=0.01, int? axis=None, "
      "int? block_size=None, bool symmetric=False, float min_scale=0.0, str rounding=\"divide\")";
  m.def(("observe_fake_quantize" + arguments + " -> Tensor").c_str(), qsim::kExactLayout);
  m.def(("observe_fake_quantize_with_mask" + arguments + " -> (Tensor y, Tensor mask)").c_str(), qsim::kExactLayout);
}
