#include <torch/library.h>

#include "schema/tags.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def(
      "observe_range_(Tensor x, Tensor(a!) lowest, Tensor(b!) highest, Tensor(c!) counts, int? axis=None, *, "
      "int? block_size=None) -> ()",
      qsim::kExactLayout);
}
