// The CUDA runtime that runs PTX, as tests see it.
#pragma once

#include <string>
#include <vector>

#include "machine.h"

namespace ptx {

// Kernels of this program that no launch has run, mangled.
std::vector<std::string> never_launched();

}  // namespace ptx
