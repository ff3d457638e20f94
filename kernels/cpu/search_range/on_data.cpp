// The range that a grid should cover, from the values themselves: weights per channel and block. The bindings call it
// through search_range_data_kernels(): one range at a time, on any thread.
#include <new>

#include "qsim/search_range/data_cost.h"
#include "qsim/search_range/percentile.h"
#include "search_range/candidates.h"
#include "vector/convert.h"

namespace qsim::cpu {

namespace {

template <class T>
FiniteValues<T> finite_values(const T* x, std::int64_t n) {
  FiniteValues<T> found{INFINITY, -INFINITY, 0};
  T lowest[kDataSums], highest[kDataSums];
  for (int lane = 0; lane < kDataSums; ++lane) lowest[lane] = INFINITY, highest[lane] = -INFINITY;
  auto add = [&](int lane, T value) {
    const T low = is_finite(value) ? value : INFINITY, high = is_finite(value) ? value : -INFINITY;
    lowest[lane] = low < lowest[lane] ? low : lowest[lane];
    highest[lane] = high > highest[lane] ? high : highest[lane];
  };
  std::int64_t i = 0;
  for (; i + kDataSums <= n; i += kDataSums) {
    for (int lane = 0; lane < kDataSums; ++lane) add(lane, x[i + lane]);
  }
  for (int lane = 0; i < n; ++lane, ++i) add(lane, x[i]);
  for (int lane = 0; lane < kDataSums; ++lane) {
    found.lowest = lowest[lane] < found.lowest ? lowest[lane] : found.lowest;
    found.highest = highest[lane] > found.highest ? highest[lane] : found.highest;
  }
  for (i = 0; i < n; ++i) found.count += is_finite(x[i]);
  return found;
}

template <bool kAllFinite, class T>
double sum_of_errors(const T* x, int n, StepError<T> error) {
  T lanes[kDataSums] = {};
  auto add = [&](int lane, T value) { lanes[lane] += error.of(kAllFinite ? value : finite_or_zero(value)); };
  int i = 0;
  for (; i + kDataSums <= n; i += kDataSums) {
    for (int lane = 0; lane < kDataSums; ++lane) add(lane, x[i + lane]);
  }
  for (int lane = 0; i < n; ++lane, ++i) add(lane, x[i]);
  return sum_of_lanes(lanes);
}

template <bool kAllFinite, class T>
double cost_of(const T* x, std::int64_t n, QuantParams<T> params, const RangeSearch& search, double limit) {
  const StepError<T> error = step_error(params, search);
  return cost_of_values(n, params.scale, limit,
                        [&](std::int64_t i, int values) { return sum_of_errors<kAllFinite>(x + i, values, error); });
}

// The same for all candidates and at most a chunk of values: a candidate in each lane of a register.
template <class T>
void costs_of_few(const T* x, int n, const CandidateEncodings<T>& encodings, const RangeSearch& search, double* costs) {
  using Vector = register_t<T>;
  constexpr int kSize = kElements<T>;
  static_assert(CandidateEncodings<T>::kMost % kSize == 0);
  for (int first = 0; first < encodings.count; first += kSize) {
    T inverse_scale[kSize], low[kSize], high[kSize];
    for (int i = 0; i < kSize; ++i) {
      const StepError<T> one = step_error(encodings[first + i], search);
      inverse_scale[i] = one.inverse_scale, low[i] = one.low, high[i] = one.high;
    }
    const StepError<Vector> error{load_as<Vector>(inverse_scale), load_as<Vector>(low), load_as<Vector>(high),
                                  Vector{} + static_cast<T>(search.gamma)};
    Vector lanes[kDataSums];
    for (int lane = 0; lane < kDataSums; ++lane) {
      lanes[lane] = Vector{};
      for (int j = lane; j < n; j += kDataSums) lanes[lane] += error.of(Vector{} + finite_or_zero(x[j]));
    }
    sum_of_lanes(lanes);
    for (int i = 0; i < kSize; ++i) {
      const double scale = encodings.scale[first + i];
      costs[first + i] = lanes[0][i] * (scale * scale);
    }
  }
}

// The power of two that divides every value, or 0 when it is less than `at_least`.
template <class T>
double lattice_unit(const T* x, std::int64_t n, double at_least) {
  double unit = INFINITY;
  for (std::int64_t i = 0; i < n && unit >= at_least; ++i) {
    if (x[i] != 0 && is_finite(x[i])) unit = smaller(unit, lowest_set_bit(x[i]));
  }
  return at_least <= unit && unit < INFINITY ? unit : 0.0;
}

template <class T>
Range least_cost(const T* x, std::int64_t n, std::int64_t finite, Range observed, const RangeSearch& search) {
  if (is_empty(observed)) return observed;  // all zeros
  const double covering = choose_qparams<double>(observed.low, observed.high, search.grid, 0).scale;
  const double unit = lattice_unit(x, n, covering), mass = static_cast<double>(finite);
  const CandidateEncodings<T> encodings({observed, search.grid});
  if (n <= kCostChunk) {
    double costs[CandidateEncodings<T>::kMost];
    costs_of_few(x, static_cast<int>(n), encodings, search, costs);
    return least_cost(encodings, unit, mass, [&](int i, double) { return costs[i]; });
  }
  return least_cost(encodings, unit, mass, [&](int i, double limit) {
    return finite == n ? cost_of<true>(x, n, encodings[i], search, limit)
                       : cost_of<false>(x, n, encodings[i], search, limit);
  });
}

template <class T>
Range least_divergence(const T* x, std::int64_t n, EntropyHistogram& histogram, Range observed,
                       const RangeSearch& search) {
  const double largest = larger(-observed.low, observed.high);
  const std::int64_t levels = entropy_levels(observed, search.grid);
  if (levels >= kEntropyBins || !(largest > 0)) return observed;
  clear(histogram, Alone());
  for (std::int64_t i = 0; i < n; ++i) {
    if (x[i] != 0 && is_finite(x[i])) ++histogram.count[entropy_bin(x[i], largest)];
  }
  return clipped_at(observed, entropy_threshold(histogram, largest, static_cast<int>(levels)));
}

template <class T>
int digit_at_rank(const T* x, std::int64_t n, std::uint64_t found, int shift, std::int64_t& rank) {
  std::int64_t counts[kDigits] = {};
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t key = order_key(x[i]) >> shift;
    if (is_finite(x[i]) && key / kDigits == found) ++counts[key % kDigits];
  }
  int digit = 0;
  for (; rank >= counts[digit]; ++digit) rank -= counts[digit];
  return digit;
}

template <class T>
Range percentile_range(const T* x, std::int64_t n, std::int64_t finite, double percentile) {
  return data_percentile(finite, percentile, [&](std::int64_t rank) {
    return value_at_rank<T>(rank, [&](std::uint64_t found, int shift, std::int64_t& left) {
      return digit_at_rank(x, n, found, shift, left);
    });
  });
}

// In float32 or float64.
template <class T>
Range choose_range(const T* x, std::int64_t n, const RangeSearch& search, void* workspace) {
  const FiniteValues<T> values = finite_values(x, n);
  if (values.count == 0) return {INFINITY, -INFINITY};
  const Range observed = values.with_zero();
  return by_method(
      search.method, [&] { return Range{values.lowest, values.highest}; },
      [&] { return percentile_range(x, n, values.count, search.percentile); },
      [&] { return least_cost(x, n, values.count, observed, search); },
      [&] { return least_divergence(x, n, *new (workspace) EntropyHistogram, observed, search); });
}

std::size_t histogram_bytes(RangeMethod method) { return needs_histogram(method) ? sizeof(EntropyHistogram) : 0; }

std::size_t workspace_bytes(Element element, std::int64_t n, RangeMethod method) {
  const bool is_wide_enough = element == Element::f32 || element == Element::f64;
  return histogram_bytes(method) + (is_wide_enough ? 0 : static_cast<std::size_t>(n) * sizeof(float));
}

template <class T>
void run(const void* x, std::int64_t n, const RangeSearch& search, void* workspace, void* low, void* high) {
  using A = arithmetic_t<T>;
  const A* values = static_cast<const A*>(x);
  if constexpr (sizeof(T) < sizeof(A)) {  // widened once, read a hundred times
    auto* widened = reinterpret_cast<A*>(static_cast<char*>(workspace) + histogram_bytes(search.method));
    values = converted(static_cast<const T*>(x), n, widened);
  }
  const Range range = choose_range(values, n, search, workspace);
  *static_cast<A*>(low) = stored_end<A>(range.low);
  *static_cast<A*>(high) = stored_end<A>(range.high);
}

}  // namespace

namespace QSIM_LEVEL {
const SearchRangeDataKernels search_range_data_kernels = {
    workspace_bytes, by_element<SearchRangeData>([]<class T>() { return run<T>; })};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
