// CUDA entry points of quantize and dequantize: as those of fake_quantize.
#pragma once

#include "qsim/cuda/fake_quantize.h"
#include "qsim/quantize.h"

namespace qsim::cuda {

// Integers are stored by their low 8 * integer_size bits, whatever their sign; integer_size is 1 or 2.
cudaError_t quantize(const FakeQuantizeCall& call, const void* x, void* q, int integer_size, cudaStream_t stream);

// call.element: that of y. The grid of the call is all of the storage type.
cudaError_t dequantize(const FakeQuantizeCall& call, Integer integer, const void* q, void* y, cudaStream_t stream);

}  // namespace qsim::cuda
