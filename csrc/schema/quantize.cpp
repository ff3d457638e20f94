#include <torch/library.h>

#include "schema/tags.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def(
      "quantize(Tensor x, Tensor scale, Tensor zero_point, int quant_min, int quant_max, *, int? axis=None, "
      "int? block_size=None, str rounding=\"divide\", ScalarType? dtype=None) -> Tensor",
      qsim::kAnyLayout);
  m.def(
      "dequantize(Tensor q, Tensor scale, Tensor zero_point, *, int? axis=None, int? block_size=None, "
      "ScalarType? dtype=None) -> Tensor",
      qsim::kAnyLayout);
}
