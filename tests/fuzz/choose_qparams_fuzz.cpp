// Scale and zero point against docs/numerics.md, section 2.
#include <algorithm>

#include "input.h"
#include "qsim/choose_qparams.h"

namespace {

using qsim::QuantGrid;
using qsim::QuantParams;

template <class T>
QuantParams<T> expected(double low, double high, QuantGrid grid, double min_scale) {
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

template <class T, class Of>
void check(fuzz::Input& input, Of of) {
  const T scale = input.positive<T>();
  const int bits = input.between(2, 16), bottom = input.pick({0, -(1 << (bits - 1)), -(1 << (bits - 1)) + 1});
  const QuantGrid grid{bottom, bottom < 0 ? (1 << (bits - 1)) - 1 : (1 << bits) - 1, input.flip()};
  const double min_scale = input.pick({0.0, 1.19e-7, 1e-3});
  std::vector<T> low(7), high(7);
  for (std::size_t i = 0; i < low.size(); ++i) {
    low[i] = input.near_steps(scale), high[i] = input.near_steps(scale);
    if (input.bits(1) % 8 && low[i] > high[i]) std::swap(low[i], high[i]);
  }
  for (qsim::cpu::Level level : fuzz::runnable_levels()) {
    std::vector<T> scales(low.size());
    std::vector<std::int32_t> zero_points(low.size());
    of(qsim::cpu::choose_qparams_kernels(level))(low.data(), high.data(), static_cast<std::int64_t>(low.size()), grid,
                                                 min_scale, scales.data(), zero_points.data());
    for (std::size_t i = 0; i < low.size(); ++i) {
      const auto params = expected<T>(low[i], high[i], grid, min_scale);
      fuzz::require_same(scales[i], params.scale, level, "scale", static_cast<std::int64_t>(i));
      fuzz::require(zero_points[i] == params.zero_point, level, "zero point");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  if (input.flip()) {
    check<float>(input, [](auto& kernels) { return kernels.f32; });
  } else {
    check<double>(input, [](auto& kernels) { return kernels.f64; });
  }
  return 0;
}
