// CUDA entry points of observe_range: device pointers, stream-ordered, no synchronisation, no allocation, capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/finite_range.h"

namespace qsim::cuda {

// x is a contiguous [outer, ranges, inner]; element (o, r, i) belongs to range r. counts: elements, NaNs, +infs, -infs.
cudaError_t observe_range(const void* x, Element element, std::int64_t outer, std::int64_t ranges, std::int64_t inner,
                          float* lowest, float* highest, std::int64_t* counts, cudaStream_t stream);

// x is a contiguous [outer, size, inner] whose middle axis is cut into blocks: ranges are [outer, ceil(size / block),
// inner].
cudaError_t observe_blocks(const void* x, Element element, std::int64_t outer, std::int64_t size, std::int64_t inner,
                           std::int64_t block, float* lowest, float* highest, std::int64_t* counts,
                           cudaStream_t stream);

}  // namespace qsim::cuda
