#include <new>

#include "qsim/data_percentile.h"
#include "qsim/entropy_range.h"
#include "qsim/search_range.h"

namespace qsim::cpu {

namespace {

constexpr int kLanes = 32;    // partial sums: the same order at every vector width
constexpr int kChunk = 1024;  // values between two looks at the limit

template <class T>
struct FiniteValues {
  T lowest = INFINITY, highest = -INFINITY;
  std::int64_t count = 0;
};

float round_even(float x) { return rintf(x); }
double round_even(double x) { return rint(x); }

template <class T>
bool is_finite(T x) {
  return x >= -largest(T{}) && x <= largest(T{});
}

template <class T>
FiniteValues<T> finite_values(const T* x, std::int64_t n) {
  FiniteValues<T> found;
  T lowest[kLanes], highest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lowest[lane] = INFINITY, highest[lane] = -INFINITY;
  auto add = [&](int lane, T value) {
    const T low = is_finite(value) ? value : INFINITY, high = is_finite(value) ? value : -INFINITY;
    lowest[lane] = low < lowest[lane] ? low : lowest[lane];
    highest[lane] = high > highest[lane] ? high : highest[lane];
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(lane, x[i + lane]);
  }
  for (int lane = 0; i < n; ++lane, ++i) add(lane, x[i]);
  for (int lane = 0; lane < kLanes; ++lane) {
    found.lowest = lowest[lane] < found.lowest ? lowest[lane] : found.lowest;
    found.highest = highest[lane] > found.highest ? highest[lane] : found.highest;
  }
  for (i = 0; i < n; ++i) found.count += is_finite(x[i]);
  return found;
}

// Squared errors in steps: errors beyond [low, high] weigh gamma. A value that is not finite counts as 0, which is
// exact.
template <class T, bool kAllFinite>
double squared_error(const T* x, int n, T inverse, T low, T high, T gamma) {
  T lanes[kLanes] = {};
  auto add = [&](int lane, T value) {
    const T t = (kAllFinite || is_finite(value) ? value : T{0}) * inverse;
    const T clamped = t < low ? low : t > high ? high : t;
    const T error = t - round_even(clamped), square = error * error;
    lanes[lane] += clamped == t ? square : gamma * square;
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(lane, x[i + lane]);
  }
  for (int lane = 0; i < n; ++lane, ++i) add(lane, x[i]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class T, bool kAllFinite>
double cost_of(const T* x, std::int64_t n, QuantParams<T> params, const RangeSearch& search, double limit) {
  const double scale = params.scale, square = scale * scale;
  const auto low = static_cast<T>(static_cast<double>(search.grid.quant_min) - params.zero_point);
  const auto high = static_cast<T>(static_cast<double>(search.grid.quant_max) - params.zero_point);
  double sum = 0;
  for (std::int64_t i = 0; i < n && sum * square <= limit; i += kChunk) {
    const int length = n - i < kChunk ? static_cast<int>(n - i) : kChunk;
    sum += squared_error<T, kAllFinite>(x + i, length, 1 / params.scale, low, high, static_cast<T>(search.gamma));
  }
  return sum * square;
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
  const double covering = choose_qparams<double>(observed.low, observed.high, search.grid, 0).scale;
  const double unit = lattice_unit(x, n, covering);
  return least_cost<T>(observed, search.grid, unit, static_cast<double>(finite),
                       [&](QuantParams<T> params, double limit) {
                         return finite == n ? cost_of<T, true>(x, n, params, search, limit)
                                            : cost_of<T, false>(x, n, params, search, limit);
                       });
}

template <class T>
Range least_divergence(const T* x, std::int64_t n, EntropyHistogram& histogram, Range observed,
                       const RangeSearch& search) {
  const double most = larger(-observed.low, observed.high);
  const std::int64_t levels = entropy_levels(observed, search.grid);
  if (levels >= kEntropyBins || !(most > 0)) return observed;
  for (double& count : histogram.count) count = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double magnitude = fabs(x[i]);
    if (magnitude > 0 && is_finite(x[i])) add_even(histogram, magnitude, magnitude, 1, most);
  }
  return least_divergence(histogram, observed, most, static_cast<int>(levels));
}

template <class T>
void run(const T* x, std::int64_t n, const RangeSearch& search, void* workspace, T* low, T* high) {
  Range range{INFINITY, -INFINITY};
  const FiniteValues<T> values = finite_values(x, n);
  if (values.count > 0) {
    const Range observed{smaller(values.lowest, 0), larger(values.highest, 0)};
    switch (search.method) {
      case RangeMethod::minmax:
        range = {values.lowest, values.highest};
        break;
      case RangeMethod::percentile:
        range = data_percentile(x, n, values.count, search.percentile);
        break;
      case RangeMethod::mse:
      case RangeMethod::tf_enhanced:
        range = least_cost(x, n, values.count, observed, search);
        break;
      case RangeMethod::entropy:
        range = least_divergence(x, n, *new (workspace) EntropyHistogram, observed, search);
        break;
    }
  }
  *low = static_cast<T>(range.low);
  *high = static_cast<T>(range.high);
}

}  // namespace

namespace QSIM_LEVEL {
const SearchRangeDataKernels search_range_data_kernels = {sizeof(EntropyHistogram), run<float>, run<double>};
}

}  // namespace qsim::cpu
