// CUDA entry point of choose_block_scale: device pointers, stream-ordered, no synchronisation, capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/block_scale.h"

namespace qsim::cuda {

// magnitude: room for one float, the largest magnitude of all finite ranges.
cudaError_t block_scale(const float* low, const float* high, std::int64_t n, const BlockScaleRule& rule,
                        float* magnitude, float* scale, cudaStream_t stream);

}  // namespace qsim::cuda
