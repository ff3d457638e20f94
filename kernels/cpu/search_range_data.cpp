#include <new>

#include "entropy_threshold.h"
#include "float_vector.h"
#include "least_cost.h"
#include "qsim/data_cost.h"
#include "qsim/data_percentile.h"
#include "qsim/search_range.h"

namespace qsim::cpu {

namespace {

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef Floats type;
};
template <>
struct VectorOf<double> {
  typedef Doubles type;
};

template <class T>
FiniteValues<T> finite_values(const T* x, std::int64_t n) {
  FiniteValues<T> found{INFINITY, -INFINITY, 0};
  T lowest[kCostLanes], highest[kCostLanes];
  for (int lane = 0; lane < kCostLanes; ++lane) lowest[lane] = INFINITY, highest[lane] = -INFINITY;
  auto add = [&](int lane, T value) {
    const T low = is_finite(value) ? value : INFINITY, high = is_finite(value) ? value : -INFINITY;
    lowest[lane] = low < lowest[lane] ? low : lowest[lane];
    highest[lane] = high > highest[lane] ? high : highest[lane];
  };
  std::int64_t i = 0;
  for (; i + kCostLanes <= n; i += kCostLanes) {
    for (int lane = 0; lane < kCostLanes; ++lane) add(lane, x[i + lane]);
  }
  for (int lane = 0; i < n; ++lane, ++i) add(lane, x[i]);
  for (int lane = 0; lane < kCostLanes; ++lane) {
    found.lowest = lowest[lane] < found.lowest ? lowest[lane] : found.lowest;
    found.highest = highest[lane] > found.highest ? highest[lane] : found.highest;
  }
  for (i = 0; i < n; ++i) found.count += is_finite(x[i]);
  return found;
}

template <bool kAllFinite, class T>
double sum_of_errors(const T* x, int n, StepError<T> error) {
  T lanes[kCostLanes] = {};
  auto add = [&](int lane, T value) { lanes[lane] += error.of(kAllFinite ? value : finite_or_zero(value)); };
  int i = 0;
  for (; i + kCostLanes <= n; i += kCostLanes) {
    for (int lane = 0; lane < kCostLanes; ++lane) add(lane, x[i + lane]);
  }
  for (int lane = 0; i < n; ++lane, ++i) add(lane, x[i]);
  for (int half = kCostLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <bool kAllFinite, class T>
double cost_of(const T* x, std::int64_t n, QuantParams<T> params, const RangeSearch& search, double limit) {
  const StepError<T> error = step_error(params, search);
  const double scale = params.scale, square = scale * scale;
  double sum = 0;
  for (std::int64_t i = 0; i < n && sum * square <= limit; i += kCostChunk) {
    sum += sum_of_errors<kAllFinite>(x + i, n - i < kCostChunk ? static_cast<int>(n - i) : kCostChunk, error);
  }
  return sum * square;
}

// The same for all candidates and at most a chunk of values: a candidate in each element of a vector.
template <class T>
void costs_of_few(const T* x, int n, const CandidateEncodings<T>& encodings, const RangeSearch& search, double* costs) {
  using Vector = typename VectorOf<T>::type;
  constexpr int kSize = kVectorBytes / sizeof(T);
  static_assert(CandidateEncodings<T>::kMost % kSize == 0);
  for (int first = 0; first < encodings.count; first += kSize) {
    T inverse_scale[kSize], low[kSize], high[kSize];
    for (int i = 0; i < kSize; ++i) {
      const StepError<T> one = step_error(encodings[first + i], search);
      inverse_scale[i] = one.inverse_scale, low[i] = one.low, high[i] = one.high;
    }
    const StepError<Vector> error{load_as<Vector>(inverse_scale), load_as<Vector>(low), load_as<Vector>(high),
                                  Vector{} + static_cast<T>(search.gamma)};
    Vector lanes[kCostLanes];
    for (int lane = 0; lane < kCostLanes; ++lane) {
      lanes[lane] = Vector{};
      for (int j = lane; j < n; j += kCostLanes) lanes[lane] += error.of(Vector{} + finite_or_zero(x[j]));
    }
    for (int half = kCostLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
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
    if (x[i] != 0 && is_finite(x[i])) unit = qsim::smaller(unit, lowest_set_bit(x[i]));
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
  const double most = qsim::larger(-observed.low, observed.high);
  const std::int64_t levels = entropy_levels(observed, search.grid);
  if (levels >= kEntropyBins || !(most > 0)) return observed;
  for (double& count : histogram.count) count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (x[i] != 0 && is_finite(x[i])) ++histogram.count[entropy_bin(x[i], most)];
  }
  return clipped_at(observed, entropy_threshold(histogram, most, static_cast<int>(levels)));
}

template <class T>
Range percentile_range(const T* x, std::int64_t n, std::int64_t finite, double percentile) {
  std::int64_t counts[256];
  auto count_digits = [&](std::int64_t* into, std::uint64_t found, int shift) {
    for (int digit = 0; digit < 256; ++digit) into[digit] = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint64_t key = order_key(x[i]) >> shift;
      if (is_finite(x[i]) && key >> 8 == found) ++into[key & 255];
    }
  };
  return data_percentile(finite, percentile,
                         [&](std::int64_t rank) { return value_at_rank<T>(rank, counts, count_digits); });
}

// In float32 or float64.
template <class T>
Range choose_range(const T* x, std::int64_t n, const RangeSearch& search, void* workspace) {
  const FiniteValues<T> values = finite_values(x, n);
  if (values.count == 0) return {INFINITY, -INFINITY};
  switch (search.method) {
    case RangeMethod::minmax:
      break;
    case RangeMethod::percentile:
      return percentile_range(x, n, values.count, search.percentile);
    case RangeMethod::mse:
    case RangeMethod::tf_enhanced:
      return least_cost(x, n, values.count, values.with_zero(), search);
    case RangeMethod::entropy:
      return least_divergence(x, n, *new (workspace) EntropyHistogram, values.with_zero(), search);
  }
  return {values.lowest, values.highest};
}

std::size_t histogram_bytes(RangeMethod method) {
  return method == RangeMethod::entropy ? sizeof(EntropyHistogram) : 0;
}

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
    const T* narrow = static_cast<const T*>(x);
    std::int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(widened + i, load(narrow + i));
    for (; i < n; ++i) widened[i] = load_one(narrow + i);
    values = widened;
  }
  const Range range = choose_range(values, n, search, workspace);
  *static_cast<A*>(low) = static_cast<A>(range.low);
  *static_cast<A*>(high) = static_cast<A>(range.high);
}

}  // namespace

namespace QSIM_LEVEL {
const SearchRangeDataKernels search_range_data_kernels = {workspace_bytes,
                                                          {run<float>, run<Float16>, run<BFloat16>, run<double>}};
}

}  // namespace qsim::cpu
