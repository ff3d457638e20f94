// One block per range. Each warp judges candidates of its own: its 32 lanes are the 32 partial sums of the CPU, so the
// same bits come out, but for the logarithms of the entropy method.
#include "launch.cuh"
#include "qsim/cuda/search_range.h"
#include "qsim/data_cost.h"
#include "qsim/data_percentile.h"
#include "qsim/entropy_range.h"
#include "search_range_block.cuh"

namespace qsim::cuda {

namespace {

constexpr int kWarps = kSearchThreads / 32;
static_assert(kCostLanes == 32, "a lane of the sum is a lane of the warp");

template <class T>
__device__ FiniteValues<T> finite_values(const T* x, std::int64_t n) {
  FiniteValues<T> mine{INFINITY, -INFINITY, 0};
  for (std::int64_t i = threadIdx.x; i < n; i += kSearchThreads) {
    if (!is_finite(x[i])) continue;
    mine = {x[i] < mine.lowest ? x[i] : mine.lowest, x[i] > mine.highest ? x[i] : mine.highest, mine.count + 1};
  }
  return block_reduce(mine, [](FiniteValues<T> a, FiniteValues<T> b) {
    return FiniteValues<T>{b.lowest < a.lowest ? b.lowest : a.lowest, b.highest > a.highest ? b.highest : a.highest,
                           a.count + b.count};
  });
}

template <class T>
__device__ double warp_cost(const T* x, std::int64_t n, QuantParams<T> params, const RangeSearch& search,
                            double limit) {
  const StepError<T> error(params, search);
  const double scale = params.scale, square = scale * scale;
  double sum = 0;
  for (std::int64_t i = 0; i < n && sum * square <= limit; i += kCostChunk) {
    T lane = 0;
    for (std::int64_t j = i + threadIdx.x % 32; j < n && j < i + kCostChunk; j += 32) {
      lane += error.template of<false>(x[j]);
    }
    for (int half = 16; half > 0; half /= 2) lane += __shfl_down_sync(~0u, lane, half);
    sum += __shfl_sync(~0u, lane, 0);
  }
  return sum * square;
}

// The power of two that divides every value, or 0 when it is less than `at_least`.
template <class T>
__device__ double lattice_unit(const T* x, std::int64_t n, double at_least) {
  double unit = INFINITY;
  for (std::int64_t i = threadIdx.x; i < n && unit >= at_least; i += kSearchThreads) {
    if (x[i] != 0 && is_finite(x[i])) unit = smaller(unit, lowest_set_bit(x[i]));
  }
  unit = block_reduce(unit, [](double a, double b) { return smaller(a, b); });
  return at_least <= unit && unit < INFINITY ? unit : 0.0;
}

template <class T>
__device__ Range least_cost(const T* x, std::int64_t n, const FiniteValues<T>& values, const RangeSearch& search) {
  const RangeCandidates<T> candidates{values.with_zero(), search.grid};
  const Range observed = candidates.observed;
  if (is_empty(observed)) return observed;  // all zeros
  const double covering = choose_qparams<double>(observed.low, observed.high, search.grid, 0).scale;
  const double unit = lattice_unit(x, n, covering);
  Judged best{INFINITY, candidates.count()};
  // a warp's largest candidate first, as on the CPU: of equals the smallest index wins
  for (int i = candidates.count() - 1 - static_cast<int>(threadIdx.x / 32); i >= 0; i -= kWarps) {
    const Range range = candidates.at(i);
    if (is_empty(range)) continue;
    const QuantParams<T> params = choose_qparams<T>(range.low, range.high, search.grid, 0);
    const double cost = warp_cost(x, n, params, search, best.cost);
    if (cost <= best.cost) best = {cost, i};
  }
  return settle(candidates, cheapest(best), unit, static_cast<double>(values.count));
}

template <class T>
__device__ Range least_divergence(const T* x, std::int64_t n, const FiniteValues<T>& values, const RangeSearch& search,
                                  EntropyHistogram& histogram) {
  const Range observed = values.with_zero();
  const double largest = larger(-observed.low, observed.high);
  const std::int64_t levels = entropy_levels(observed, search.grid);
  if (levels >= kEntropyBins || !(largest > 0)) return observed;
  for (int bin = static_cast<int>(threadIdx.x); bin <= kEntropyBins; bin += kSearchThreads) histogram.count[bin] = 0;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < n; i += kSearchThreads) {
    // whole numbers below 2^53: exact in any order
    if (x[i] != 0 && is_finite(x[i])) atomicAdd(&histogram.count[entropy_bin(x[i], largest)], 1.0);
  }
  return clipped_at(observed, block_entropy_threshold(histogram, largest, static_cast<int>(levels)));
}

template <class T>
__device__ Range percentile_range(const T* x, std::int64_t n, std::int64_t finite, double percentile) {
  __shared__ std::int64_t counts[256];
  auto count_digits = [&](std::int64_t* into, std::uint64_t found, int shift) {
    __syncthreads();
    for (int digit = static_cast<int>(threadIdx.x); digit < 256; digit += kSearchThreads) into[digit] = 0;
    __syncthreads();
    for (std::int64_t i = threadIdx.x; i < n; i += kSearchThreads) {
      const std::uint64_t key = order_key(x[i]) >> shift;
      if (is_finite(x[i]) && key >> 8 == found) {
        atomicAdd(reinterpret_cast<unsigned long long*>(into + (key & 255)), 1ull);
      }
    }
    __syncthreads();
  };
  return data_percentile(finite, percentile,
                         [&](std::int64_t rank) { return value_at_rank<T>(rank, counts, count_digits); });
}

template <class T>
__device__ Range choose_range(const T* x, std::int64_t n, const FiniteValues<T>& values, const RangeSearch& search,
                              EntropyHistogram& histogram) {
  if (values.count == 0) return {INFINITY, -INFINITY};
  switch (search.method) {
    case RangeMethod::minmax:
      break;
    case RangeMethod::percentile:
      return percentile_range(x, n, values.count, search.percentile);
    case RangeMethod::mse:
    case RangeMethod::tf_enhanced:
      return least_cost(x, n, values, search);
    case RangeMethod::entropy:
      return least_divergence(x, n, values, search, histogram);
  }
  return {values.lowest, values.highest};
}

template <class T>
__global__ void __launch_bounds__(kSearchThreads)
    run(const T* data, std::int64_t length, std::int64_t block, std::int64_t count, RangeSearch search,
        EntropyHistogram* histograms, T* low, T* high) {
  const std::int64_t row_blocks = length > 0 ? (length + block - 1) / block : 1;
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const std::int64_t start = i % row_blocks * block;
    const std::int64_t n = length - start < block ? length - start : block;
    const T* x = data + i / row_blocks * length + start;
    const Range range = choose_range(x, n, finite_values(x, n), search, histograms[blockIdx.x]);
    if (threadIdx.x == 0) {
      low[i] = static_cast<T>(range.low);
      high[i] = static_cast<T>(range.high);
    }
  }
}

// Only the entropy method needs memory of its own, one histogram a block; the others fill the device.
std::int64_t blocks_for(std::int64_t count, RangeMethod method) {
  const std::int64_t most = method == RangeMethod::entropy ? kSearchBlocks : 65535;
  return count < most ? count : most;
}

}  // namespace

std::size_t search_range_data_workspace_bytes(std::int64_t count, RangeMethod method) {
  return method == RangeMethod::entropy ? blocks_for(count, method) * sizeof(EntropyHistogram) : 0;
}

template <class T>
cudaError_t search_range_data(const T* x, std::int64_t length, std::int64_t block, std::int64_t count,
                              const RangeSearch& search, void* workspace, T* low, T* high, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return launch(run<T>, {static_cast<unsigned>(blocks_for(count, search.method)), kSearchThreads}, stream, x, length,
                block, count, search, static_cast<EntropyHistogram*>(workspace), low, high);
}

template cudaError_t search_range_data(const float*, std::int64_t, std::int64_t, std::int64_t, const RangeSearch&,
                                       void*, float*, float*, cudaStream_t);
template cudaError_t search_range_data(const double*, std::int64_t, std::int64_t, std::int64_t, const RangeSearch&,
                                       void*, double*, double*, cudaStream_t);

}  // namespace qsim::cuda
