// CUDA entry points of choose_qparams: device pointers, stream-ordered, no synchronisation. Elements beyond 2^31 are
// not expected: n counts scales, not values.
#pragma once

#include <cuda_runtime_api.h>

#include "qsim/choose_qparams.h"

namespace qsim::cuda {

template <class T>  // float, double
cudaError_t choose_qparams(const T* low, const T* high, int n, QuantGrid grid, double min_scale, T* scale,
                           std::int32_t* zero_point, cudaStream_t stream);

}  // namespace qsim::cuda
