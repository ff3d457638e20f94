// Layouts, grids and elements for the tests of the kernels that read Grids.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "qsim/fake_quantize.h"

namespace cases {

using qsim::Grid;
using qsim::Layout;
using qsim::cpu::Grids;

inline constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// Parameter of element e, read off the definition of Layout one element at a time.
inline std::int64_t parameter_of(std::int64_t e, const Layout& layout) {
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment;
  const std::int64_t inside = e % layout.outer, segment = e / layout.outer * segments + inside / layout.segment;
  return segment * layout.width + inside % layout.segment / layout.run % layout.width;
}

struct Case {
  Layout layout;
  std::int64_t n;
};

inline const std::vector<Case> kCases = {
    {{1000, 1000, 1, 1000}, 1000},        // per tensor
    {{7, 7, 1, 7}, 7},                    // shorter than a vector
    {{900, 9, 1, 9}, 900},                // outermost channel of a 3x3 kernel
    {{4000, 4000, 5, 40}, 4000},          // channels of 40 elements
    {{4000, 4000, 5, 9}, 4000},           // channels of 9
    {{3000, 3000, 300, 1}, 3000},         // channels last
    {{12800, 12800, 64, 1}, 12800},       // channels last, rows of whole vectors
    {{16000, 16000, 80, 1}, 16000},       // the same, not a whole number of register tiles
    {{1600, 1600, 4, 49}, 1600},          // channels of 7x7
    {{70, 32, 1, 1}, 700},                // blocks of 32, the last of each row short
    {{256, 64, 1, 1}, 5120},              // blocks of 64
    {{33 * 10, 4 * 33, 33, 1}, 3 * 330},  // blocks of 4 rows of 33, the last of each repetition short
};

inline const qsim::cpu::PrepareGrids<float>& prepare_kernels(float) {
  return qsim::cpu::fake_quantize_kernels(qsim::cpu::Level::baseline).prepare_f32;
}
inline const qsim::cpu::PrepareGrids<double>& prepare_kernels(double) {
  return qsim::cpu::fake_quantize_kernels(qsim::cpu::Level::baseline).prepare_f64;
}

template <class T>
Grids<T> arrays(std::vector<T>& storage) {
  T* const first = storage.data();
  const auto n = static_cast<std::ptrdiff_t>(storage.size()) / Grids<T>::kArrays;
  return {first, first + n, first + 2 * n, first + 3 * n, first + 4 * n, first + 5 * n};
}

// Random scales and zero points, with a grid from quant_min to quant_max. One scale of `irregular` grids is too small
// for thresholds.
template <class T>
struct Parameters {
  explicit Parameters(const Case& c, bool irregular = false, bool learned = false, T quant_min = -8, T quant_max = 7,
                      qsim::cpu::Bounds bounds = qsim::cpu::Bounds::of_range) {
    const std::int64_t count = (parameter_of(c.n - 1, c.layout) / c.layout.width + 1) * c.layout.width;
    std::mt19937 random(1);
    std::vector<T> zero_points;
    for (std::int64_t i = 0; i < count; ++i) {
      scales.push_back(i % 2 ? T(0.5) : std::uniform_real_distribution<T>(T(0.01), T(0.6))(random));
      zero_points.push_back(quant_min + static_cast<T>(random() % 16) + (learned ? T(0.25) : T(0)));
    }
    if (irregular) scales[0] = T(1e-38);
    storage.resize(Grids<T>::kArrays * count);
    grids = arrays(storage);
    grids.regular =
        prepare_kernels(T{}).learned(scales.data(), zero_points.data(), count, quant_min, quant_max, bounds, grids);
  }
  Grid<T> at(std::int64_t parameter) const {
    return {grids.scale[parameter], grids.low[parameter], grids.high[parameter]};
  }

  std::vector<T> scales, storage;
  Grids<T> grids;
};

template <class T>
std::vector<T> elements(std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<T> normal(0, 4);
  const T specials[] = {0, T(-0.0), T(0.25), T(-0.25), T(0.75), T(1e-45), T(-1e-3), T(3e38), -kInf, kInf, kNan};
  std::vector<T> x(n);
  for (T& value : x) value = random() % 4 ? normal(random) : specials[random() % 11];
  return x;
}

template <class T>
bool same_bits(T a, T b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Values of the 16-bit formats by definition.
inline double value_of(qsim::Float16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const double magnitude = exponent == 31  ? (fraction ? kNan : kInf)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return x.bits & 0x8000 ? -magnitude : magnitude;
}
inline double value_of(qsim::BFloat16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline double value_of(float x) { return x; }
inline double value_of(double x) { return x; }

}  // namespace cases
