// One block per range. Each warp judges candidates of its own: its 32 lanes are the 32 partial sums of the CPU, so the
// same bits come out, but for the logarithms of the entropy method.
#include "elements.cuh"
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
__device__ auto finite_values(const T* x, std::int64_t n) {
  using Values = FiniteValues<computed_t<T>>;
  Values mine{INFINITY, -INFINITY, 0};
  for (std::int64_t i = threadIdx.x; i < n; i += kSearchThreads) {
    const auto value = widened(x[i]);
    if (!is_finite(value)) continue;
    mine = {value < mine.lowest ? value : mine.lowest, value > mine.highest ? value : mine.highest, mine.count + 1};
  }
  return block_reduce(mine, [](Values a, Values b) {
    return Values{b.lowest < a.lowest ? b.lowest : a.lowest, b.highest > a.highest ? b.highest : a.highest,
                  a.count + b.count};
  });
}

template <class T>
__device__ double warp_cost(const T* x, std::int64_t n, QuantParams<computed_t<T>> params, const RangeSearch& search,
                            double limit) {
  const auto error = step_error(params, search);
  const double scale = params.scale, square = scale * scale;
  double sum = 0;
  for (std::int64_t i = 0; i < n && sum * square <= limit; i += kCostChunk) {
    computed_t<T> lane = 0;
    for (std::int64_t j = i + threadIdx.x % 32; j < n && j < i + kCostChunk; j += 32) {
      lane += error.of(finite_or_zero(widened(x[j])));
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
    const auto value = widened(x[i]);
    if (value != 0 && is_finite(value)) unit = smaller(unit, lowest_set_bit(value));
  }
  unit = block_reduce(unit, [](double a, double b) { return smaller(a, b); });
  return at_least <= unit && unit < INFINITY ? unit : 0.0;
}

template <class T>
__device__ Range least_cost(const T* x, std::int64_t n, const FiniteValues<computed_t<T>>& values,
                            const RangeSearch& search) {
  const RangeCandidates<computed_t<T>> candidates{values.with_zero(), search.grid};
  const Range observed = candidates.observed;
  if (is_empty(observed)) return observed;  // all zeros
  const double covering = choose_qparams<double>(observed.low, observed.high, search.grid, 0).scale;
  const double unit = lattice_unit(x, n, covering);
  Judged best;
  // a warp's largest candidate first, as on the CPU: of equals the smallest index wins
  for (int i = candidates.count() - 1 - static_cast<int>(threadIdx.x / 32); i >= 0; i -= kWarps) {
    const Range range = candidates.at(i);
    if (is_empty(range)) continue;
    const auto params = choose_qparams<computed_t<T>>(range.low, range.high, search.grid, 0);
    const double cost = warp_cost(x, n, params, search, best.cost);
    if (cost <= best.cost) best = {cost, i};
  }
  return cheapest(best).settled(candidates, unit, static_cast<double>(values.count));
}

template <class T>
__device__ Range least_divergence(const T* x, std::int64_t n, const FiniteValues<computed_t<T>>& values,
                                  const RangeSearch& search, EntropyHistogram& histogram) {
  const Range observed = values.with_zero();
  const double largest = larger(-observed.low, observed.high);
  const std::int64_t levels = entropy_levels(observed, search.grid);
  if (levels >= kEntropyBins || !(largest > 0)) return observed;
  for (int bin = static_cast<int>(threadIdx.x); bin <= kEntropyBins; bin += kSearchThreads) histogram.count[bin] = 0;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < n; i += kSearchThreads) {
    const auto value = widened(x[i]);
    // whole numbers below 2^53: exact in any order
    if (value != 0 && is_finite(value)) atomicAdd(&histogram.count[entropy_bin(value, largest)], 1.0);
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
      const auto value = widened(x[i]);
      const std::uint64_t key = order_key(value) >> shift;
      if (is_finite(value) && key >> 8 == found) {
        atomicAdd(reinterpret_cast<unsigned long long*>(into + (key & 255)), 1ull);
      }
    }
    __syncthreads();
  };
  return data_percentile(finite, percentile,
                         [&](std::int64_t rank) { return value_at_rank<computed_t<T>>(rank, counts, count_digits); });
}

template <class T>
__device__ Range choose_range(const T* x, std::int64_t n, const FiniteValues<computed_t<T>>& values,
                              const RangeSearch& search, EntropyHistogram& histogram) {
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

// The tensor that owns a range.
__device__ int owner(const DataTable& table, std::int64_t range) {
  int low = 0, high = table.tensors;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_range[middle] <= range) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T>
__device__ void store_range(const DataTable& table, std::int64_t range, Range found) {
  const int t = owner(table, range);
  const std::int64_t i = range - table.first_range[t];
  static_cast<computed_t<T>*>(table.low[t])[i] = static_cast<computed_t<T>>(found.low);
  static_cast<computed_t<T>*>(table.high[t])[i] = static_cast<computed_t<T>>(found.high);
}

template <class T>
__device__ Range range_of(const DataTable& table, std::int64_t range, const RangeSearch& search,
                          EntropyHistogram& histogram) {
  const int t = owner(table, range);
  const std::int64_t i = range - table.first_range[t], length = table.length[t], block = table.block[t];
  const std::int64_t row_blocks = (length + block - 1) / block, start = i % row_blocks * block;
  const T* x = static_cast<const T*>(table.data[t]) + i / row_blocks * length + start;
  const std::int64_t n = length - start < block ? length - start : block;
  return choose_range(x, n, finite_values(x, n), {table.grid[t], search.method, search.percentile, search.gamma},
                      histogram);
}

template <class T>
__global__ void __launch_bounds__(kSearchThreads)
    run(__grid_constant__ const DataTable table, __grid_constant__ const RangeSearch search,
        EntropyHistogram* histograms) {
  for (std::int64_t range = blockIdx.x; range < table.first_range[table.tensors]; range += gridDim.x) {
    const Range found = range_of<T>(table, range, search, histograms[blockIdx.x]);
    if (threadIdx.x == 0) store_range<T>(table, range, found);
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

cudaError_t search_range_data(const DataTable& table, Element element, const RangeSearch& search, void* workspace,
                              cudaStream_t stream) {
  const std::int64_t count = table.first_range[table.tensors];
  if (count == 0) return cudaSuccess;
  return with_element(element, [&](auto zero) {
    const LaunchShape shape{static_cast<unsigned>(blocks_for(count, search.method)), kSearchThreads};
    return launch(run<decltype(zero)>, shape, stream, table, search, static_cast<EntropyHistogram*>(workspace));
  });
}

}  // namespace qsim::cuda
