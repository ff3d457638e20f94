// From a range to scale and zero point (docs/numerics.md, section 2).
//
// All arithmetic is float64 and is cast once, so a width of 6e38 (data of +-3e38) is an ordinary range. 0.0 is always
// on the grid, and both ends of the grid are finite numbers of type T.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "qsim/half_even.h"
#include "qsim/level.h"
#include "qsim/portability.h"

namespace qsim {

template <class T>
struct QuantParams {
  T scale;  // NaN when the range is empty (nothing was observed) or not finite
  std::int32_t zero_point;
};

struct QuantGrid {
  std::int32_t quant_min, quant_max;  // quant_min < quant_max
  bool symmetric;
};

QSIM_HD float largest(float) { return FLT_MAX; }
QSIM_HD double largest(double) { return DBL_MAX; }
QSIM_HD float next_smaller(float x) { return nextafterf(x, 0.f); }
QSIM_HD double next_smaller(double x) { return nextafter(x, 0.0); }

QSIM_HD double clamp_to(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

// The scale that spreads [low, high] over the grid, at least min_scale and a normal float32, and its zero point; low <=
// 0
// <= high, finite. No branch but on the grid: loops over it vectorise.
QSIM_HD QuantParams<double> spread(double low, double high, QuantGrid grid, double min_scale) {
  const double qmin = grid.quant_min, qmax = grid.quant_max, floor = min_scale > FLT_MIN ? min_scale : FLT_MIN;
  double scale, zero_point = 0;
  if (grid.symmetric) {
    zero_point = round_half_even((qmin + qmax) / 2);
    const double below = zero_point - qmin, above = qmax - zero_point;
    // A 2-bit grid [-2, 1] would lose half of its range to its short side: the top is clipped instead.
    const double top = 2 * above <= below ? below : above;
    const double bottom = below > 0 ? below : top;  // the grid [0, 1] has no side below its zero point
    const double from_high = high / top, from_low = -low / bottom;
    scale = from_high > from_low ? from_high : from_low;
  } else {
    scale = (high - low) / (qmax - qmin);
  }
  scale = low == high ? 1 : scale < floor ? floor : scale;
  if (!grid.symmetric) zero_point = clamp_to(round_half_even(qmin - low / scale), qmin, qmax);
  return {scale, static_cast<std::int32_t>(zero_point)};
}

// The largest scale of type T whose product with `steps` does not overflow T.
template <class T>
QSIM_HD T largest_scale(double steps) {
  const double limit = largest(T{}) / steps;
  T scale = static_cast<T>(limit);
  while (static_cast<double>(scale) * steps > largest(T{})) scale = next_smaller(scale);
  return scale;
}

// As type T, no larger than the ceiling that keeps both ends of the grid finite.
template <class T>
QSIM_HD QuantParams<T> below_ceiling(QuantParams<double> params, QuantGrid grid) {
  const double below = params.zero_point - static_cast<double>(grid.quant_min);
  const double above = grid.quant_max - static_cast<double>(params.zero_point);
  if (2 * params.scale * (below + above) < largest(T{})) return {static_cast<T>(params.scale), params.zero_point};
  const T ceiling = largest_scale<T>(below > above ? below : above);
  return {params.scale < ceiling ? static_cast<T>(params.scale) : ceiling, params.zero_point};
}

template <class T>
QSIM_HD QuantParams<T> choose_qparams(double low, double high, QuantGrid grid, double min_scale) {
  const bool finite = low <= high && low >= -largest(T{}) && high <= largest(T{});
  if (!finite) return {static_cast<T>(NAN), grid.symmetric ? spread(0, 0, grid, 0).zero_point : grid.quant_min};
  return below_ceiling<T>(spread(low < 0 ? low : 0.0, high > 0 ? high : 0.0, grid, min_scale), grid);
}

namespace cpu {

struct ChooseQparamsKernels {
  void (*f32)(const float* low, const float* high, std::int64_t n, QuantGrid grid, double min_scale, float* scale,
              std::int32_t* zero_point);
  void (*f64)(const double* low, const double* high, std::int64_t n, QuantGrid grid, double min_scale, double* scale,
              std::int32_t* zero_point);
};
QSIM_LEVEL_TABLES(ChooseQparamsKernels, choose_qparams_kernels)

}  // namespace cpu
}  // namespace qsim
