#include "int4.h"

#include <torch/library.h>

namespace qsim {
TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("pack_int4", empty_packed);
  m.impl("unpack_int4", empty_unpacked);
}
}  // namespace qsim
