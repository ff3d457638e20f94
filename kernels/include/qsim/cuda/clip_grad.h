// CUDA entry points of gradient clipping: device pointers, stream-ordered, no synchronisation, no allocation,
// capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/clip_grad.h"

namespace qsim::cuda {

// Some gradients, passed to a kernel by value: one launch for all of them. Gradient g owns the chunks
// [first_chunk[g], first_chunk[g + 1]) of kGradChunk elements.
struct GradTable {
  static constexpr int kMost = 96;  // a kernel takes 4 KB of arguments on every device
  void* data[kMost];
  std::int64_t size[kMost];
  int first_chunk[kMost + 1];
  std::uint8_t element[kMost];  // of Element
  int grads;
};

// power: one number per chunk. nonfinite: one per gradient; counts are added to it.
cudaError_t sum_grads(const GradTable& table, double p, double* power, std::int64_t* nonfinite, cudaStream_t stream);

// Joins the numbers of each gradient's chunks, in a fixed order: powers: one per gradient.
cudaError_t join_grad_sums(const GradTable& table, double p, const double* power, double* powers, cudaStream_t stream);

// Decides what becomes of the gradients, from n powers and counts. total_norm is float32, or float64 when `wide`.
cudaError_t plan_scaling(const double* powers, const std::int64_t* counts, int n, double p, double max_norm,
                         NonFinitePolicy policy, GradScaling* plan, void* total_norm, bool wide, cudaStream_t stream);

// Does so; returns at once where the plan is to keep them.
cudaError_t scale_grads(const GradTable& table, const GradScaling* plan, cudaStream_t stream);

}  // namespace qsim::cuda
