// One block per range. Each warp judges candidates of its own: its 32 lanes are the 32 partial sums of the CPU, so the
// same bits come out, but for the logarithms of the entropy method.
#include "elements.cuh"
#include "qsim/cuda/search_range.h"
#include "qsim/search_range/data_cost.h"
#include "qsim/search_range/entropy.h"
#include "qsim/search_range/percentile.h"
#include "search_range_block.cuh"

namespace qsim::cuda {

namespace {

static_assert(kDataSums == 32, "a lane of the sum is a lane of the warp");

template <class T>
__device__ auto finite_values(const T* x, std::int64_t n) {
  using Values = FiniteValues<computed_t<T>>;
  Values mine{INFINITY, -INFINITY, 0};
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    const auto value = widened(x[i]);
    if (!is_finite(value)) continue;
    mine = {value < mine.lowest ? value : mine.lowest, value > mine.highest ? value : mine.highest, mine.count + 1};
  }
  return reduce_block_for_all(mine, [](Values a, Values b) {
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
    using Sum = computed_t<T>;
    sum += __shfl_sync(kWholeWarp, join_halves(lane, [](Sum a, Sum b) { return a + b; }), 0);
  }
  return sum * square;
}

// The power of two that divides every value, or 0 when it is less than `at_least`.
template <class T>
__device__ double lattice_unit(const T* x, std::int64_t n, double at_least) {
  double unit = INFINITY;
  for (std::int64_t i = threadIdx.x; i < n && unit >= at_least; i += kThreads) {
    const auto value = widened(x[i]);
    if (value != 0 && is_finite(value)) unit = smaller(unit, lowest_set_bit(value));
  }
  unit = reduce_block_for_all(unit, [](double a, double b) { return smaller(a, b); });
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
  for (int bin = static_cast<int>(threadIdx.x); bin <= kEntropyBins; bin += kThreads) histogram.count[bin] = 0;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    const auto value = widened(x[i]);
    // whole numbers below 2^53: exact in any order
    if (value != 0 && is_finite(value)) atomicAdd(&histogram.count[entropy_bin(value, largest)], 1.0);
  }
  return clipped_at(observed, block_entropy_threshold(histogram, largest, static_cast<int>(levels)));
}

// The digit in bits [shift, shift + 8) of the key with `rank` finite ones before it, among those that begin with the
// digits found so far; `rank` becomes its rank among those that have that digit too. A thread counts one digit.
template <class T>
__device__ int digit_at_rank(const T* x, std::int64_t n, std::uint64_t found, int shift, std::int64_t& rank) {
  static_assert(kDigits == kThreads);
  __shared__ unsigned long long counts[kDigits];
  __shared__ std::int64_t rank_of_digit;
  __shared__ int digit;
  __syncthreads();
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    const auto value = widened(x[i]);
    const std::uint64_t key = order_key(value) >> shift;
    if (is_finite(value) && key / kDigits == found) atomicAdd(counts + key % kDigits, 1ull);
  }
  __syncthreads();
  const auto mine = static_cast<std::int64_t>(counts[threadIdx.x]), before = sum_of_threads_before(mine);
  if (before <= rank && rank < before + mine) {
    digit = static_cast<int>(threadIdx.x);
    rank_of_digit = rank - before;
  }
  __syncthreads();
  rank = rank_of_digit;
  return digit;
}

template <class T>
__device__ Range percentile_range(const T* x, std::int64_t n, std::int64_t finite, double percentile) {
  return data_percentile(finite, percentile, [&](std::int64_t rank) {
    return value_at_rank<computed_t<T>>(rank, [&](std::uint64_t found, int shift, std::int64_t& left) {
      return digit_at_rank(x, n, found, shift, left);
    });
  });
}

template <class T>
__device__ Range choose_range(const T* x, std::int64_t n, const FiniteValues<computed_t<T>>& values,
                              const RangeSearch& search, EntropyHistogram& histogram) {
  if (values.count == 0) return {INFINITY, -INFINITY};
  return range_by(
      search.method, {values.lowest, values.highest},
      [&] { return percentile_range(x, n, values.count, search.percentile); },
      [&] { return least_cost(x, n, values, search); },
      [&] { return least_divergence(x, n, values, search, histogram); });
}

template <class T>
__device__ void store_range(const DataTable& table, std::int64_t range, Range found) {
  const int t = owner_of(range, table.first_range, table.tensors);
  const std::int64_t i = range - table.first_range[t];
  static_cast<computed_t<T>*>(table.low[t])[i] = static_cast<computed_t<T>>(found.low);
  static_cast<computed_t<T>*>(table.high[t])[i] = static_cast<computed_t<T>>(found.high);
}

template <class T>
__device__ Range range_of(const DataTable& table, std::int64_t range, const RangeSearch& search,
                          EntropyHistogram& histogram) {
  const int t = owner_of(range, table.first_range, table.tensors);
  const std::int64_t i = range - table.first_range[t], length = table.length[t], block = table.block[t];
  const std::int64_t row_blocks = (length + block - 1) / block, start = i % row_blocks * block;
  const T* x = static_cast<const T*>(table.data[t]) + i / row_blocks * length + start;
  const std::int64_t n = length - start < block ? length - start : block;
  return choose_range(x, n, finite_values(x, n), {table.grid[t], search.method, search.percentile, search.gamma},
                      histogram);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    run(__grid_constant__ const DataTable table, __grid_constant__ const RangeSearch search,
        EntropyHistogram* histograms) {
  for (std::int64_t range = blockIdx.x; range < table.first_range[table.tensors]; range += gridDim.x) {
    const Range found = range_of<T>(table, range, search, histograms[blockIdx.x]);
    if (threadIdx.x == 0) store_range<T>(table, range, found);
  }
}

// Only the entropy method needs memory of its own, one histogram a block; the others fill the device.
std::int64_t blocks_of(std::int64_t count, RangeMethod method) {
  return needs_histogram(method) ? blocks_with_workspace(count) : std::min<std::int64_t>(count, 65535);
}

}  // namespace

std::size_t search_range_data_workspace_bytes(std::int64_t count, RangeMethod method) {
  return needs_histogram(method) ? blocks_of(count, method) * sizeof(EntropyHistogram) : 0;
}

cudaError_t search_range_data(const DataTable& table, Element element, const RangeSearch& search, void* workspace,
                              cudaStream_t stream) {
  const std::int64_t count = table.first_range[table.tensors];
  if (count == 0) return cudaSuccess;
  return with_element(element, [&](auto zero) {
    const LaunchShape shape{static_cast<unsigned>(blocks_of(count, search.method)), kThreads};
    return launch(run<decltype(zero)>, shape, stream, table, search, static_cast<EntropyHistogram*>(workspace));
  });
}

}  // namespace qsim::cuda
