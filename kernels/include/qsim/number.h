// What a formula asks of a number that has no operator. N: float, double, or a register of them, for which
// kernels/cpu/vector/registers.h answers: one formula serves all.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "qsim/portability.h"

namespace qsim {

QSIM_HD bool is_finite(float x) { return fabsf(x) <= FLT_MAX; }
QSIM_HD bool is_finite(double x) { return x - x == 0; }  // in loops cheaper than the other, by 10 % of a search

// NaN stays NaN: every comparison with it is false. `low` and `high` are numbers; of two zeros either may come out.
template <class T>
QSIM_HD T clamp_keeping_nan(T x, T low, T high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, float>) {  // two instructions instead of four; C++ has no name for them
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
    return x;
  }
#endif
  x = low > x ? low : x;
  return high < x ? high : x;
}

// Bits: signed integers of the same shape. multiply_add: of products that are exact, where it does not matter whether
// they are rounded in between. fused: a * b + c, rounded once.
template <class N>
struct Number;
template <>
struct Number<float> {
  using Bits = std::int32_t;
  static constexpr int kMantissa = 23;
  static QSIM_HD float multiply_add(float a, float b, float c) { return a * b + c; }
  static QSIM_HD float fused(float a, float b, float c) { return fmaf(a, b, c); }
  static QSIM_HD float clamped(float x, float low, float high) { return clamp_keeping_nan(x, low, high); }
};
template <>
struct Number<double> {
  using Bits = std::int64_t;
  static constexpr int kMantissa = 52;
  static QSIM_HD double multiply_add(double a, double b, double c) { return a * b + c; }
};

template <class N>
using bits_t = typename Number<N>::Bits;

template <class N>
QSIM_HD bits_t<N> bits_of(N x) {
  bits_t<N> bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

template <class N>
QSIM_HD N number_of(bits_t<N> bits) {
  N x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace qsim
