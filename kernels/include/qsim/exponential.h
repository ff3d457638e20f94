// exp and log to the accuracy of float32, out of operations that every compiler rounds alike: the same bits at each
// instruction-set level and in CUDA, and loops that vectorise.
#pragma once

#include "qsim/number.h"
#include "qsim/portability.h"

namespace qsim {

inline constexpr float kLog2Upper = 0x1.62ep-1f, kLog2Lower = 0x1.0bfbe8p-15f;  // log 2, the first exact times a power
inline constexpr float kNoFraction = 0x1.8p23f;  // added to a small number it leaves the next integer in the last bits

// Taylor's series from the term `i` on: 1 + x / i * (1 + x / (i + 1) * ...). Written as a loop it would keep the loops
// around it from being vectorised.
template <int i = 1>
QSIM_HD float exponential_series(float x) {
  if constexpr (i > 7) {
    return 1;
  } else {
    return 1 + x * (1.0f / i) * exponential_series<i + 1>(x);
  }
}

// Of |x| up to 87; beyond as there. NaN: any number.
QSIM_HD float exponential(float x) {
  constexpr float kLog2e = 0x1.715476p0f;
  x = clamp_keeping_nan(x, -87.0f, 87.0f);
  const float shifted = x * kLog2e + kNoFraction, power = shifted - kNoFraction;
  const float rest = (x - power * kLog2Upper) - power * kLog2Lower;
  return exponential_series(rest) * number_of<float>((bits_of(shifted) + 127) << Number<float>::kMantissa);
}

// The series of the inverse hyperbolic tangent from the term `i` on, by the square of what it is of.
template <int i = 0>
QSIM_HD float tangent_series(float square) {
  if constexpr (i == 5) {
    return 1.0f / (2 * i + 1);
  } else {
    return 1.0f / (2 * i + 1) + square * tangent_series<i + 1>(square);
  }
}

// Of normal positive numbers.
QSIM_HD float logarithm(float x) {
  constexpr int kMantissa = Number<float>::kMantissa;
  const std::int32_t exponent = (bits_of(x) - bits_of(0x1.6a09e6p-1f)) >> kMantissa;  // by half of the root of 2
  const float mantissa = number_of<float>(bits_of(x) - (exponent << kMantissa));      // from there to the root
  const float power = number_of<float>(bits_of(kNoFraction) + exponent) - kNoFraction;
  const float s = (mantissa - 1) / (mantissa + 1);
  return power * kLog2Upper + (2 * s * tangent_series(s * s) + power * kLog2Lower);
}

}  // namespace qsim
