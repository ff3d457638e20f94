// Rounding half to even, the only rounding there is (docs/numerics.md, section 1): to an integer, and to the upper half
// of a float32.
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

// The bits of a float32, not NaN, whose upper 16 become those of the nearest bfloat16; the lower ones are left over. A
// carry out of the mantissa is the next exponent, up to that of Inf. Bits: an integer of 32 bits, or a register of
// them.
template <class Bits>
QSIM_HD Bits round_upper_half(Bits bits) {
  return bits + 0x7fff + (bits >> 16 & 1);
}

}  // namespace qsim
