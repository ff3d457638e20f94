// CUDA entry point of rounding that is learned: device pointers, stream-ordered, no synchronisation, no allocation,
// capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/soft_round.h"

namespace qsim::cuda {

// `rows` rows one after the other; `first` is one of them.
cudaError_t soft_round(std::int64_t rows, const SoftRow& first, const SoftRounding& how, cudaStream_t stream);

}  // namespace qsim::cuda
