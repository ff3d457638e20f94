#include <torch/library.h>

#include "schema/tags.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def("fake_quantize_bias(Tensor bias, Tensor input_scale, Tensor weight_scale) -> Tensor", qsim::kAnyLayout);
  m.def("fake_quantize_bias_with_mask(Tensor bias, Tensor input_scale, Tensor weight_scale) -> (Tensor y, Tensor mask)",
        qsim::kExactLayout);
}
