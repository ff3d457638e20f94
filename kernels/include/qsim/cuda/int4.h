// CUDA entry points of pack_int4 and unpack_int4: device pointers, stream-ordered, capturable. n: 4-bit integers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace qsim::cuda {

cudaError_t pack_int4(const std::uint8_t* q, std::int64_t n, std::uint8_t* packed, cudaStream_t stream);

cudaError_t unpack_int4(const std::uint8_t* packed, std::int64_t n, bool is_signed, std::uint8_t* q,
                        cudaStream_t stream);

}  // namespace qsim::cuda
