// CUDA entry points of the range searches: device pointers, stream-ordered, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "qsim/search_range.h"

namespace qsim::cuda {

// Device memory that a launch for `count` ranges works in; whatever it holds before.
std::size_t search_range_workspace_bytes(std::int64_t count);
std::size_t search_range_data_workspace_bytes(std::int64_t count, RangeMethod method);

// One range per sketch of kSketchBins counters. Nothing seen: (+Inf, -Inf).
cudaError_t search_range(const float* lowest, const float* highest, const std::int64_t* sketch, std::int64_t count,
                         const RangeSearch& search, void* workspace, float* low, float* high, cudaStream_t stream);

// One range per block of `block` values (the last of a row may be short) in rows of `length`; values that are not
// finite are skipped. No finite one: (+Inf, -Inf).
template <class T>  // float, double
cudaError_t search_range_data(const T* x, std::int64_t length, std::int64_t block, std::int64_t count,
                              const RangeSearch& search, void* workspace, T* low, T* high, cudaStream_t stream);

}  // namespace qsim::cuda
