#include <torch/library.h>

#include "schema/tags.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def(
      "search_range(Tensor lowest, Tensor highest, Tensor sketch, int quant_min, int quant_max, "
      "bool symmetric=False, str method=\"tf_enhanced\", *, float percentile=99.99, float gamma=3.0, "
      "Tensor? low_bits=None) -> (Tensor min, Tensor max)",
      qsim::kAnyLayout);
  m.def(
      "search_range_data(Tensor x, int quant_min, int quant_max, *, int? axis=None, int? block_size=None, "
      "bool symmetric=False, str method=\"tf_enhanced\", float percentile=99.99, float gamma=3.0) "
      "-> (Tensor min, Tensor max)",
      qsim::kAnyLayout);
  // One entry per weight in each list.
  m.def(
      "search_range_weights(Tensor[] weights, int[] quant_min, int[] quant_max, *, bool[] symmetric, int?[] axis, "
      "int?[] block_size, str method=\"tf_enhanced\", float percentile=99.99, float gamma=3.0) "
      "-> (Tensor[] min, Tensor[] max)",
      qsim::kAnyLayout);
}
