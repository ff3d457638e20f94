#include <torch/library.h>

#include "schema/tags.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def("pack_int4(Tensor q) -> Tensor", qsim::kAnyLayout);
  m.def("unpack_int4(Tensor packed, SymInt[] shape, *, ScalarType? dtype=None) -> Tensor", qsim::kAnyLayout);
}
