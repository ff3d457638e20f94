// Finite ranges of tensors, channels and blocks: found by observe_range.cuh, joined to the state.
#include "qsim/cuda/observe_range.h"

#include "observe_range.cuh"

namespace qsim::cuda {

namespace {

struct Extend {
  float *lowest, *highest;

  __device__ bool wanted() const { return true; }
  __device__ void range_of_block(FiniteRange range, std::int64_t i) const {
    range.merge({lowest[i], highest[i]});
    lowest[i] = range.lowest;
    highest[i] = range.highest;
  }
  __device__ void all_joined() const {}
};

}  // namespace

cudaError_t observe_range(const void* x, Element element, std::int64_t outer, std::int64_t ranges, std::int64_t inner,
                          float* lowest, float* highest, std::int64_t* counts, cudaStream_t stream) {
  return launch_ranges(x, element, outer, ranges, inner, lowest, highest, counts, Extend{lowest, highest}, stream);
}

cudaError_t observe_blocks(const void* x, Element element, std::int64_t outer, std::int64_t size, std::int64_t inner,
                           std::int64_t block, float* lowest, float* highest, std::int64_t* counts,
                           cudaStream_t stream) {
  return launch_blocks(x, element, outer, size, inner, block, counts, Extend{lowest, highest}, stream);
}

}  // namespace qsim::cuda
