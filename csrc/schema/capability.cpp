#include <torch/library.h>

#include <string>

#include "qsim/level.h"

TORCH_LIBRARY_FRAGMENT(qsim, m) {
  m.def("cpu_capability() -> str", [] { return std::string(qsim::cpu::name_of(qsim::cpu::level())); });
}
