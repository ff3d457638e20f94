// Tiles of elements in arithmetic type: float32 copies of the 16-bit formats, the memory itself for float32 and
// float64.
#pragma once

#include <cstdint>
#include <cstring>

#include "float_vector.h"
#include "loops.h"

namespace qsim::cpu {
namespace {

// Elements converted at a time. Few, so that the processor overlaps converting one tile with computing another.
constexpr std::int64_t kTile = 256;

// float32 and float64 are computed where they lie, as long as a run lasts.
template <class T>
constexpr bool kInMemory = sizeof(T) == sizeof(arithmetic_t<T>);
template <class T>
constexpr std::int64_t kLongestRun = kInMemory<T> ? INT64_MAX : kTile;
template <class T>
constexpr std::int64_t kBuffer = kInMemory<T> ? 1 : kTile;

// load_tile: the elements in arithmetic type, in `buffer` if they had to be converted.
inline const float* load_tile(const float* from, std::int64_t, float*) { return from; }
inline const double* load_tile(const double* from, std::int64_t, double*) { return from; }

template <class Half>
const float* load_tile(const Half* from, std::int64_t n, float* buffer) {
  const std::int64_t whole = n / kWidth * kWidth;
  for (std::int64_t i = 0; i < whole; i += kWidth) store(buffer + i, load(from + i));
  for (std::int64_t i = whole; i < n; ++i) buffer[i] = load_one(from + i);
  return buffer;
}

// result_tile: where to compute results that store_tile then brings to `to`.
inline float* result_tile(float* to, float*) { return to; }
inline double* result_tile(double* to, double*) { return to; }
template <class Half>
float* result_tile(Half*, float* buffer) {
  return buffer;
}

inline void store_tile(const float*, std::int64_t, float*) {}
inline void store_tile(const double*, std::int64_t, double*) {}

// Rounds to nearest even: any float, NaN and what overflows included.
QSIM_INLINE void round_to(BFloat16* to, Floats x) {
  const Words bits = (Words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_as(to, narrow(x == x ? rounded : Words{} + 0x7fc0));
}

QSIM_INLINE void round_to(Float16* to, Floats x) {
#if defined(__F16C__)
  store(to, x);
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

// Two vectors of finite numbers or NaNs that came from bfloat16: those at even places and those at odd ones.
QSIM_INLINE Words round_pairs(Floats even, Floats odd) {
  const Words low = (Words)even, high = (Words)odd;
  return (low + 0x7fff + (low >> 16 & 1)) >> 16 | ((high + 0x7fff + (high >> 16 & 1)) & 0xffff0000);
}

template <class Half>
void store_tile(const float* from, std::int64_t n, Half* to) {
  const std::int64_t whole = n / kWidth * kWidth;
  for (std::int64_t i = 0; i < whole; i += kWidth) round_to(to + i, load(from + i));
  if (whole == n) return;
  float rest[kWidth] = {};
  Half rounded[kWidth];
  std::memcpy(rest, from + whole, static_cast<std::size_t>(n - whole) * sizeof(float));
  round_to(rounded, load(rest));
  std::memcpy(to + whole, rounded, static_cast<std::size_t>(n - whole) * sizeof(Half));
}

// Rounding to 16 bits can underflow to -0.0; a zero result is +0.0.
template <class Half>
QSIM_INLINE void drop_sign_of_zero(Half* y) {
  const Shorts bits = load_as<Shorts>(y);
  store_as(y, ~(Shorts)(bits == 0x8000) & bits);
}
inline void drop_sign_of_zero(float*, std::int64_t) {}
inline void drop_sign_of_zero(double*, std::int64_t) {}
template <class Half>
void drop_sign_of_zero(Half* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i].bits = y[i].bits == 0x8000 ? 0 : y[i].bits;
}

}  // namespace
}  // namespace qsim::cpu
