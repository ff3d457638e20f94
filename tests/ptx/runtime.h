// The CUDA runtime that runs PTX, as tests see it.
#pragma once

#include <string>
#include <vector>

#include "machine.h"

namespace ptx {

// Kernels of this program that no launch has run, mangled.
std::vector<std::string> never_launched();

// Of all launches since the last call: the instructions of all threads, and of each launch the steps of the warp that
// took most, added up, which is what no device does faster.
Work work_since_last_call();

}  // namespace ptx
