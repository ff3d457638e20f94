// CUDA entry point of fake_quantize_bias: device pointers, stream-ordered, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/element.h"

namespace qsim::cuda {

// Element i has the scale input_scale[0] * weight_scale[i % scales]. mask may be null: the bits of what is in range,
// those past the end 0.
cudaError_t fake_quantize_bias(const void* bias, Element element, int n, const float* input_scale,
                               const float* weight_scale, int scales, void* y, std::uint8_t* mask, cudaStream_t stream);

}  // namespace qsim::cuda
