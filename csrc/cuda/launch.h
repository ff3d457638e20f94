// The stream to launch on and the check after a launch. No device-wide synchronisation anywhere.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace qsim {

inline cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

inline void check_launch(cudaError_t status) { C10_CUDA_CHECK(status); }

}  // namespace qsim
