// CUDA entry points of round_to_format: device pointers, stream-ordered, no synchronisation, no allocation, capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/finite_range.h"
#include "qsim/round_to_format.h"

namespace qsim::cuda {

struct RoundToFormatCall {
  Element element;
  std::int64_t n;
  FloatFormat format;
  bool saturate;
  const void* scale;  // as `layout` says, of the arithmetic type; null: none is scaled
  Layout layout;
};

// y may be x. mask: one bit per element, (n + 7) / 8 bytes, or null.
cudaError_t round_to_format(const RoundToFormatCall& call, const void* x, void* y, std::uint8_t* mask,
                            cudaStream_t stream);

// How many SquaredSums `partial` holds below.
int format_partials(std::int64_t n);

// Adds to counts (elements, NaNs, Infs, overflows, underflows, subnormals) and squares (error, signal). y and squares
// may be null; partial is needed for squares, whatever it holds before.
cudaError_t count_format(const RoundToFormatCall& call, const void* x, void* y, std::int64_t* counts, double* squares,
                         SquaredSums* partial, cudaStream_t stream);

}  // namespace qsim::cuda
