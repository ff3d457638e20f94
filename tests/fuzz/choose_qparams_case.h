// Scale and zero point after docs/numerics.md, section 2.
#pragma once

#include <algorithm>

#include "input.h"
#include "qsim/choose_qparams.h"

namespace fuzz {

using qsim::QuantGrid;
using qsim::QuantParams;

template <class T>
QuantParams<T> expected_qparams(double low, double high, QuantGrid grid, double min_scale) {
  const double qmin = grid.quant_min, qmax = grid.quant_max, most = std::numeric_limits<T>::max();
  const bool finite = low <= high && -most <= low && high <= most;
  const double middle = std::nearbyint((qmin + qmax) / 2);
  if (!finite) return {std::numeric_limits<T>::quiet_NaN(), static_cast<std::int32_t>(grid.symmetric ? middle : qmin)};
  low = std::min(low, 0.0), high = std::max(high, 0.0);
  double scale = (high - low) / (qmax - qmin), zero_point = middle;
  if (grid.symmetric) {
    const double above = qmax - middle, below = middle - qmin;
    scale = std::max(high / (2 * above <= below ? below : above), -low / below);
  }
  scale = low == high ? 1.0 : std::max({scale, min_scale, double{std::numeric_limits<float>::min()}});
  if (!grid.symmetric) zero_point = std::clamp(std::nearbyint(qmin - low / scale), qmin, qmax);
  const double steps = std::max(zero_point - qmin, qmax - zero_point);
  T rounded = scale > most ? std::numeric_limits<T>::max() : static_cast<T>(scale);
  if (rounded * steps > most) rounded = static_cast<T>(most / steps);  // both ends of the grid stay finite
  while (rounded * steps > most) rounded = std::nextafter(rounded, T(0));
  return {rounded, static_cast<std::int32_t>(zero_point)};
}

inline QuantGrid any_grid(Input& input) {
  const int bits = input.between(2, 16), bottom = input.pick({0, -(1 << (bits - 1)), -(1 << (bits - 1)) + 1});
  return {bottom, bottom < 0 ? (1 << (bits - 1)) - 1 : (1 << bits) - 1, input.flip()};
}

}  // namespace fuzz
