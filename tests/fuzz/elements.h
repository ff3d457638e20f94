// Element types by definition, and how a target reports a difference.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "qsim/element.h"
#include "qsim/level.h"

namespace fuzz {

using qsim::arithmetic_t;
using qsim::BFloat16;
using qsim::Float16;

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
inline float widened(Float16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const double magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>(x.bits & 0x8000 ? -magnitude : magnitude);
}

// Round to nearest even, into a format with `fraction` bits whose smallest normal number is 2^least.
inline std::uint16_t narrowed(double x, int fraction, int least) {
  const int exponent_bits = 15 - fraction;
  const auto infinity = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << fraction);
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (std::isnan(x)) return infinity | 1 << (fraction - 1);
  if (std::isinf(x) || x == 0) return std::isinf(x) ? sign | infinity : sign;
  const int unit = std::max(std::ilogb(x), least) - fraction;
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(x), -unit)));
  const int bits = ((unit - least + fraction) << fraction) + units;  // a carry reaches the exponent
  return static_cast<std::uint16_t>(sign | std::min<int>(bits, infinity));
}

template <class T>
T narrowed(arithmetic_t<T> x) {
  if constexpr (std::is_same_v<T, Float16>) return {narrowed(x, 10, -14)};
  if constexpr (std::is_same_v<T, BFloat16>) return {narrowed(x, 7, -126)};
  if constexpr (std::is_floating_point_v<T>) return x;
}

// Every NaN is as good as another.
template <class T>
bool same(T a, T b) {
  if constexpr (std::is_class_v<T>) {
    return a.bits == b.bits || (std::isnan(widened(a)) && std::isnan(widened(b)));
  } else {
    using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
    return std::bit_cast<Bits>(a) == std::bit_cast<Bits>(b) || (std::isnan(a) && std::isnan(b));
  }
}

template <class T>
void require_same(T got, T expected, qsim::cpu::Level level, const char* what, std::int64_t at) {
  if (same(got, expected)) return;
  std::fprintf(stderr, "level %s, %s, element %lld: got %a, expected %a\n", qsim::cpu::name_of(level).data(), what,
               static_cast<long long>(at), static_cast<double>(widened(got)), static_cast<double>(widened(expected)));
  std::abort();
}

inline void require(bool holds, qsim::cpu::Level level, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "level %s: %s\n", qsim::cpu::name_of(level).data(), what);
  std::abort();
}

inline const std::vector<qsim::cpu::Level>& runnable_levels() {
  using qsim::cpu::Level;
  static const std::vector<Level> levels = [] {
    std::vector<Level> found;
    for (Level level : {Level::baseline, Level::avx2, Level::avx512}) {
      if (qsim::cpu::supported(level)) found.push_back(level);
    }
    return found;
  }();
  return levels;
}

}  // namespace fuzz
