// Counts, range and sketch in one pass: each block counts a slice in shared memory.
#include <algorithm>

#include "elements.cuh"
#include "qsim/cuda/observe.h"
#include "qsim/sketch.h"
#include "range_state.cuh"

namespace qsim::cuda {

namespace {

constexpr int kSketchThreads = 512, kBlocksEach = 2;  // two fit on a multiprocessor; more would flush more
constexpr std::int64_t kElementsPerBlock = 32768;     // fewer do not pay for clearing and flushing 64 KB of counters

// Whether Inf and NaN would be counted there.
__device__ __forceinline__ bool is_nonfinite_bin(int bin) { return bin % kSketchSide >= kSketchSide - kNonFiniteBins; }

// Each block counts its slice (fewer than 2^31 elements) in shared memory and flushes what is not zero. What is not
// finite is counted too, in bins of its own: a slice that has some is visited once more for all but the bins.
template <class T>
__global__ void __launch_bounds__(kSketchThreads, kBlocksEach)
    observe_slices(const T* x, std::int64_t n, std::int64_t slice, float* lowest, float* highest, std::int64_t* counts,
                   Sketch sketch) {
  auto* bins = reinterpret_cast<unsigned*>(dynamic_shared);
  __shared__ bool all_finite;
  if (threadIdx.x == 0) all_finite = true;
  for (int bin = threadIdx.x; bin < kSketchBins; bin += kSketchThreads) bins[bin] = 0;
  __syncthreads();
  const std::int64_t first = blockIdx.x * slice;
  const auto visit = [&](auto f) {
    for_each_element(x + first, static_cast<int>(min(slice, n - first)), threadIdx.x, kSketchThreads, f);
  };
  FiniteRange range;
  NonFinite found;
  unsigned low_bits = 0;
  visit([&](float e) {
    e += 0.f;  // -0 is in the bin of 0
    const unsigned bits = __float_as_uint(e);
    range.lowest = fminf(range.lowest, e);
    range.highest = fmaxf(range.highest, e);
    low_bits |= bits;
    // The literal 1 and the unused result let the hardware add equal bins of a warp at once.
    atomicAdd(&bins[bits >> kSketchShift], 1u);
  });
  __syncthreads();
  for (int bin = threadIdx.x; bin < kSketchBins; bin += kSketchThreads) {
    if (!is_nonfinite_bin(bin)) {
      add(sketch.counts + bin, bins[bin]);
    } else if (bins[bin] != 0) {
      all_finite = false;
    }
  }
  __syncthreads();
  if (!all_finite) {
    range = {};
    low_bits = 0;
    visit([&](float e) {
      qsim::observe(e, range, found);
      if (is_finite(e)) low_bits |= __float_as_uint(e);
    });
  }
  range = range_of_warp(range);
  if (threadIdx.x % 32 == 0) join(range, lowest, highest);
  join(found, counts);
  join(low_bits & kLowBits, sketch.low_bits);
  if (blockIdx.x == 0 && threadIdx.x == 0) add(counts, n);
}

}  // namespace

cudaError_t observe(const void* x, Element element, std::int64_t n, float* lowest, float* highest, std::int64_t* counts,
                    Sketch sketch, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const std::int64_t blocks =
      std::min(kBlocksEach * multiprocessors(), (n + kElementsPerBlock - 1) / kElementsPerBlock);
  const std::int64_t slice = ((n + blocks - 1) / blocks + 15) / 16 * 16;  // whole packs
  const auto used = static_cast<unsigned>((n + slice - 1) / slice);
  return with_element(element, [&](auto type) {
    using T = decltype(type);
    return launch(observe_slices<T>, {used, kSketchThreads, kSketchBins * sizeof(unsigned)}, stream,
                  static_cast<const T*>(x), n, slice, lowest, highest, counts, sketch);
  });
}

}  // namespace qsim::cuda
