// Rounding half to even, as onto every grid (docs/numerics.md, section 1): to an integer, and to the upper half of a
// float32. Only scales stored as powers of two may round otherwise (block_scale.h).
//
// N: float, double, or a register of them, for which kernels/cpu/vector/half_even.h says how. CUDA rounds to 16-bit
// types by instructions that do the same (kernels/cuda/elements.cuh).
#pragma once

#include <cmath>

#include "qsim/portability.h"

namespace qsim {

template <class N>
struct HalfEven;
template <>
struct HalfEven<float> {
  static QSIM_HD float integer(float x) { return rintf(x); }
};
template <>
struct HalfEven<double> {
  static QSIM_HD double integer(double x) { return rint(x); }
};

template <class N>
QSIM_HD N round_half_even(N x) {
  return HalfEven<N>::integer(x);
}

// The same for |x| <= 2^22 and NaN; which zero comes out is left open, and what lies beyond stays beyond. Behind 1.5 *
// 2^23 a float32 has no fraction left: two additions, where CUDA's rint is a conversion, at a quarter of their rate.
template <class N>
QSIM_HD N round_few_half_even(N x) {
#if defined(__CUDA_ARCH__)
  constexpr float kNoFraction = 0x1.8p23f;
  return (x + kNoFraction) - kNoFraction;
#else
  return round_half_even(x);
#endif
}

// The bits of a float32, not NaN, whose upper 16 become those of the nearest bfloat16; the lower ones are left over. A
// carry out of the mantissa is the next exponent, up to that of Inf. Bits: an integer of 32 bits, or a register of
// them.
template <class Bits>
QSIM_HD Bits round_upper_half(Bits bits) {
  return bits + 0x7fff + (bits >> 16 & 1);
}

}  // namespace qsim
