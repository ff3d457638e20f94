#include <torch/library.h>

#include "schema/tags.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def(
      "observe_(Tensor x, Tensor(a!) lowest, Tensor(b!) highest, Tensor(c!) counts, Tensor(d!) sketch, "
      "Tensor(e!) low_bits) -> ()",
      qsim::kExactLayout);
}
