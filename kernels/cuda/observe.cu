#include <algorithm>

#include "elements.cuh"
#include "qsim/cuda/observe.h"
#include "qsim/sketch.h"
#include "range_state.cuh"

namespace qsim::cuda {

namespace {

constexpr int kThreads = 512;
constexpr std::int64_t kElementsPerBlock = 32768;  // fewer do not pay for clearing and flushing 64 KB of counters
constexpr std::int64_t kMostBlocks = 132 * 2;      // two fit on a multiprocessor; more would flush more

// Each block counts its slice (fewer than 2^31 elements) in shared memory and flushes what is not zero.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    observe_slices(const T* x, std::int64_t n, std::int64_t slice, float* lowest, float* highest, std::int64_t* counts,
                   Sketch sketch) {
  auto* bins = reinterpret_cast<unsigned*>(dynamic_shared);
  for (int bin = threadIdx.x; bin < kSketchBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
  const std::int64_t first = blockIdx.x * slice;
  FiniteRange range;
  NonFinite found;
  unsigned low_bits = 0;
  for_each_element(x + first, static_cast<int>(min(slice, n - first)), threadIdx.x, kThreads, [&](float e) {
    qsim::observe(e, range, found);
    // The literal 1 and the unused result let the hardware add equal bins of a warp at once.
    if (!is_finite(e)) return;
    const unsigned bits = __float_as_uint(e);
    atomicAdd(&bins[sketch_bin(bits)], 1u);
    low_bits |= bits;
  });
  __syncthreads();
  for (int bin = threadIdx.x; bin < kSketchBins; bin += kThreads) add(sketch.counts + bin, bins[bin]);
  range = warp_range(range);
  if (threadIdx.x % 32 == 0) join(range, lowest, highest);
  join(found, counts);
  join(low_bits & kLowBits, sketch.low_bits);
  if (blockIdx.x == 0 && threadIdx.x == 0) add(counts, n);
}

}  // namespace

cudaError_t observe(const void* x, Element element, std::int64_t n, float* lowest, float* highest, std::int64_t* counts,
                    Sketch sketch, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const std::int64_t blocks = std::min(kMostBlocks, (n + kElementsPerBlock - 1) / kElementsPerBlock);
  const std::int64_t slice = ((n + blocks - 1) / blocks + 15) / 16 * 16;  // whole packs
  const auto used = static_cast<unsigned>((n + slice - 1) / slice);
  return with_element(element, [&](auto type) {
    using T = decltype(type);
    return launch(observe_slices<T>, {used, kThreads, kSketchBins * sizeof(unsigned)}, stream, static_cast<const T*>(x),
                  n, slice, lowest, highest, counts, sketch);
  });
}

}  // namespace qsim::cuda
