// CUDA entry points of observe: device pointers, stream-ordered, no synchronisation, no allocation, capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/finite_range.h"
#include "qsim/sketch.h"

namespace qsim::cuda {

// One range for n elements, and the sketch.
cudaError_t observe(const void* x, Element element, std::int64_t n, float* lowest, float* highest, std::int64_t* counts,
                    Sketch sketch, cudaStream_t stream);

}  // namespace qsim::cuda
