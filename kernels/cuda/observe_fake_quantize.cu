// Running ranges: the batch's range is found by observe_range.cuh and followed in the same launch.
#include "qsim/cuda/observe_fake_quantize.h"

#include "observe_range.cuh"

namespace qsim::cuda {

namespace {

// The range of the batch, while it is being found.
struct Batch {
  float *lowest, *highest;
  unsigned* arrived;  // blocks that have joined theirs
};

__global__ void clear(Batch batch, std::int64_t ranges) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i == 0) *batch.arrived = 0;
  if (i < ranges) batch.lowest[i] = INFINITY, batch.highest[i] = -INFINITY;
}

// The block that comes last moves the running ranges: no launch of its own, and none that waits for the host.
struct Follow {
  Running running;
  Batch batch;
  std::int64_t n;

  __device__ bool wanted() const { return *running.observing != 0; }
  __device__ void range_of_block(FiniteRange range, std::int64_t i) const {
    follow(range, i, running.rule, running.ranges);
  }
  __device__ void all_joined() const {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(batch.arrived, 1u) == gridDim.x * gridDim.y - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {  // past the first-level cache, where others wrote
      follow({__ldcg(batch.lowest + i), __ldcg(batch.highest + i)}, i, running.rule, running.ranges);
    }
  }
};

}  // namespace

cudaError_t follow_ranges(const void* x, Element element, std::int64_t outer, std::int64_t ranges, std::int64_t inner,
                          const Running& running, void* workspace, cudaStream_t stream) {
  auto* lowest = static_cast<float*>(workspace);
  const Batch batch{lowest, lowest + ranges, reinterpret_cast<unsigned*>(lowest + 2 * ranges)};
  const LaunchShape one_thread_each{static_cast<unsigned>((ranges + kThreads - 1) / kThreads), kThreads};
  const cudaError_t status = launch(clear, one_thread_each, stream, batch, ranges);
  if (status != cudaSuccess) return status;
  return launch_ranges(x, element, outer, ranges, inner, batch.lowest, batch.highest, running.counts,
                       Follow{running, batch, ranges}, stream);
}

cudaError_t follow_blocks(const void* x, Element element, std::int64_t outer, std::int64_t size, std::int64_t inner,
                          std::int64_t block, const Running& running, cudaStream_t stream) {
  return launch_blocks(x, element, outer, size, inner, block, running.counts, Follow{running, {}, 0}, stream);
}

}  // namespace qsim::cuda
