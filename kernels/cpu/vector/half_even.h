// Rounding registers half to even: to integers kept as floats, to integers, and to the 16-bit element types.
#pragma once

#include "qsim/half_even.h"
#include "registers.h"

namespace qsim {

// Loops over the lanes, of which compilers make one instruction where the level has it.
template <>
struct HalfEven<cpu::Floats> {
  static QSIM_INLINE cpu::Floats integer(cpu::Floats x) {
    for (int i = 0; i < cpu::kFloats; ++i) x[i] = rintf(x[i]);
    return x;
  }
};

template <>
struct HalfEven<cpu::Doubles> {
  static QSIM_INLINE cpu::Doubles integer(cpu::Doubles x) {
    for (int i = 0; i < cpu::kDoubles; ++i) x[i] = rint(x[i]);
    return x;
  }
};

namespace cpu {
namespace {

// The least Int for what has no Int, NaN above all.
QSIM_INLINE Ints nearest_integers(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
  return __builtin_convertvector(x >= -0x1p31f ? round_half_even(x) : all(-0x1p31f), Ints);
#endif
}

// round_to: any float to an element, NaN and what overflows included.
QSIM_INLINE void round_to(float* to, Floats x) { store(to, x); }
QSIM_INLINE void round_to(double* to, Doubles x) { store(to, x); }

QSIM_INLINE void round_to(BFloat16* to, Floats x) {
  store_as(to, narrow(x == x ? round_upper_half((Words)x) >> 16 : Words{} + 0x7fc0));
}

QSIM_INLINE void round_to(Float16* to, Floats x) {
#if defined(__AVX512F__)
  store_as(to, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  store_as(to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  // Below 2^-14 the sum with 0.5 rounds to multiples of 2^-24 by itself; above, rounding carries into the exponent.
  const Words magnitude = (Words)x & 0x7fffffff;
  const Words normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Words subnormal = (Words)((Floats)magnitude + 0.5f) - (Words)all(0.5f);
  const Words special = x == x ? Words{} + 0x7c00 : Words{} + 0x7e00;
  const Words rounded = magnitude < 0x38800000 ? subnormal : magnitude < 0x47800000 ? normal : special;
  store_as(to, narrow(rounded | ((Words)x >> 16 & 0x8000)));
#endif
}

// The same of finite numbers, which bfloat16 has for less.
template <class T>
QSIM_INLINE void round_finite_to(T* to, Floats x) {
  round_to(to, x);
}
QSIM_INLINE void round_finite_to(BFloat16* to, Floats x) { store_as(to, narrow(round_upper_half((Words)x) >> 16)); }

// Two registers of finite numbers, or of NaNs that came from bfloat16: the elements at even places and those at odd
// ones.
QSIM_INLINE Words round_pairs(Floats even, Floats odd) {
  return round_upper_half((Words)even) >> 16 | (round_upper_half((Words)odd) & 0xffff0000);
}

// Rounding to 16 bits can underflow to -0.0; a zero result is +0.0.
template <class Half>
QSIM_INLINE void drop_sign_of_zero(Half* y) {
  const Shorts bits = load_as<Shorts>(y);
  store_as(y, ~(Shorts)(bits == 0x8000) & bits);
}

}  // namespace
}  // namespace cpu
}  // namespace qsim
