// Range search: which part of the observed range a grid should cover (docs/numerics.md, section 4).
//
// A candidate is a range; its cost is that of the encoding which choose_qparams makes of it, so the range returned
// leads to exactly the encoding that was judged. The search on a sketch and the search on the data share candidates.
// What each method costs a candidate, or finds without any, is in search_range/:
//
//   mse, tf_enhanced   sketch_cost.h (with point_masses.h), data_cost.h
//   percentile         percentile.h
//   entropy            entropy.h
#pragma once

#include <cstddef>
#include <string_view>

#include "qsim/choose_qparams.h"
#include "qsim/enumerated.h"
#include "qsim/finite_range.h"
#include "qsim/half_even.h"
#include "qsim/number.h"

namespace qsim {

enum class RangeMethod { minmax, percentile, mse, tf_enhanced, entropy };

// What it is called where one is chosen.
constexpr std::string_view name_of(RangeMethod method) {
  switch (method) {
    case RangeMethod::minmax:
      return "minmax";
    case RangeMethod::percentile:
      return "percentile";
    case RangeMethod::mse:
      return "mse";
    case RangeMethod::tf_enhanced:
      return "tf_enhanced";
    case RangeMethod::entropy:
      return "entropy";
  }
  return {};
}

struct RangeSearch {
  QuantGrid grid;
  RangeMethod method;
  double percentile;  // share of the values that the range keeps, 0 < percentile <= 100
  double gamma;       // weight of the squared error of values that round off the grid; mse has 1
};

struct Range {
  double low, high;
};

QSIM_HD double smaller(double a, double b) { return a < b ? a : b; }
QSIM_HD double larger(double a, double b) { return a > b ? a : b; }

QSIM_HD double grid_steps(QuantGrid grid) { return static_cast<double>(grid.quant_max) - grid.quant_min; }

QSIM_HD bool is_empty(Range range) { return !(range.low < range.high); }

// The candidates for values of type T observed in [low, high], in the order that settles ties: scales in 1/100
// (symmetric) or 1/16 (asymmetric) of the one that covers everything, the largest a step beyond it; asymmetric with 20
// offsets and the observed one, clamped to the observed range (AIMET, TfEnhancedEncodingAnalyzer). Some are empty: skip
// them.
template <class T>
struct RangeCandidates {
  static constexpr int kSymmetricScales = 101, kScales = 17, kOffsets = 20, kMost = kScales * (kOffsets + 1);

  Range observed;  // zero joined, not empty
  QuantGrid grid;

  QSIM_HD int count() const { return grid.symmetric ? kSymmetricScales : kMost; }

  QSIM_HD Range at(int index) const {
    const Range range =
        grid.symmetric ? scaled(index + 1) : shifted(index / (kOffsets + 1) + 1, index % (kOffsets + 1));
    const double limit = largest(T{});
    return {static_cast<T>(larger(range.low, -limit)), static_cast<T>(smaller(range.high, limit))};
  }

 private:
  QSIM_HD Range scaled(int percent) const {
    return {observed.low * percent / (kSymmetricScales - 1), observed.high * percent / (kSymmetricScales - 1)};
  }

  QSIM_HD Range shifted(int k, int i) const {
    const double n = grid_steps(grid), width = observed.high - observed.low, delta = width / n * k / (kScales - 1);
    const double offset =
        i == kOffsets ? round_half_even(observed.low / width * n) : round_half_even(n * i / (kOffsets - 1) - n);
    return {larger(observed.low, delta * offset), smaller(observed.high, delta * (offset + n))};
  }
};

// Values that are integers times `unit` and fit the grid are exact with scale `unit`, and with a half, a quarter ... of
// it: the range that leads to the finest of them that fits, empty where none does. What was not observed lies between
// the values that were, so steps beyond the range are worth nothing. unit: a power of two, or 0 when there is none.
QSIM_HD Range lossless_range(Range observed, QuantGrid grid, double unit) {
  const QuantParams<double> covering = choose_qparams<double>(observed.low, observed.high, grid, 0);
  if (unit == 0 || unit < covering.scale) return {0, 0};
  while (unit >= 2 * covering.scale) unit /= 2;
  if (!grid.symmetric) return {observed.low, observed.low + unit * grid_steps(grid)};
  return {unit * (static_cast<double>(grid.quant_min) - covering.zero_point),
          unit * (static_cast<double>(grid.quant_max) - covering.zero_point)};
}

// Whether a best cost is beyond what rounding the scale alone costs, so that an exact encoding is worth leaving the
// observed range. Relative to the cost of `mass` values spread evenly over steps of `scale`.
QSIM_HD bool loses_something(double cost, double mass, double scale) {
  return cost > 1e-6 * mass * (scale * scale / 12);
}

// The largest power of two that divides x (finite, not zero): what its lowest bit is worth.
QSIM_HD double lowest_set_bit(double x) {
  x = fabs(x);
  const auto bits = static_cast<std::uint64_t>(bits_of(x));
  if ((bits & ((1ull << 52) - 1)) == 0) return x;
  const double without = number_of<double>(static_cast<std::int64_t>(bits & (bits - 1)));
  return x - without;
}

// The range of the candidate found to have the least cost (-1: there was none), or the lossless one where that is worth
// it.
template <class T>
QSIM_HD Range settled(const RangeCandidates<T>& candidates, int best, double cost, double unit, double mass) {
  const Range range = best < 0 ? candidates.observed : candidates.at(best);
  const Range lossless = lossless_range(candidates.observed, candidates.grid, unit);
  const double scale = choose_qparams<T>(range.low, range.high, candidates.grid, 0).scale;
  return !is_empty(lossless) && loses_something(cost, mass, scale) ? lossless : range;
}

// What `method` asks for: the one place that chooses between ways to look. They take no argument.
template <class MinMax, class Percentile, class LeastCost, class LeastDivergence>
QSIM_HD auto by_method(RangeMethod method, MinMax minmax, Percentile percentile, LeastCost least_cost,
                       LeastDivergence least_divergence) {
  switch (method) {
    case RangeMethod::minmax:
      break;
    case RangeMethod::percentile:
      return percentile();
    case RangeMethod::mse:
    case RangeMethod::tf_enhanced:
      return least_cost();
    case RangeMethod::entropy:
      return least_divergence();
  }
  return minmax();
}

// Whether a search by `method` needs memory for an EntropyHistogram.
QSIM_HD bool needs_histogram(RangeMethod method) { return method == RangeMethod::entropy; }

namespace cpu {

struct SearchRangeKernels {
  std::size_t workspace_bytes;
  // The range for one sketch of kSketchBins counters. Nothing seen: (+Inf, -Inf).
  void (*run)(float lowest, float highest, const std::int64_t* sketch, std::uint32_t low_bits,
              const RangeSearch& search, void* workspace, float* low, float* high);
};
QSIM_LEVEL_TABLES(SearchRangeKernels, search_range_kernels)

// The range of n values, as float64 for f64 and as float32 for the others; values that are not finite are skipped. No
// finite one: (+Inf, -Inf).
using SearchRangeData = void (*)(const void* x, std::int64_t n, const RangeSearch& search, void* workspace, void* low,
                                 void* high);

struct SearchRangeDataKernels {
  // What a search over up to n values of one method works in, in bytes.
  std::size_t (*workspace_bytes)(Element element, std::int64_t n, RangeMethod method);
  ByElement<SearchRangeData> run;
};
QSIM_LEVEL_TABLES(SearchRangeDataKernels, search_range_data_kernels)

}  // namespace cpu
}  // namespace qsim
