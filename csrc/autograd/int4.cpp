#include <torch/library.h>

// Integers in, integers out: nothing to differentiate.
TORCH_LIBRARY_IMPL(qsim, Autograd, m) {
  m.impl("pack_int4", torch::CppFunction::makeFallthrough());
  m.impl("unpack_int4", torch::CppFunction::makeFallthrough());
}
