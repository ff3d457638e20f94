// Tiles of elements in arithmetic type: float32 copies of the 16-bit formats, the memory itself for float32 and
// float64.
#pragma once

#include <cstdint>
#include <cstring>

#include "loops.h"
#include "qsim/half.h"
#include "qsim/portability.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

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

template <class To, class From>
QSIM_HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

QSIM_HD float to_float(BFloat16 x) { return bits_as<float>(static_cast<std::uint32_t>(x.bits) << 16); }

QSIM_HD BFloat16 round_to(BFloat16, float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<std::uint16_t>(x == x ? rounded : 0x7fc0)};
}

// The exponent moves by a multiplication, which also normalises subnormals; Inf and NaN keep their bits.
QSIM_HD float to_float(Float16 x) {
  const std::uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const auto finite = bits_as<std::uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  const std::uint32_t bits = magnitude < (0x7c00u << 13) ? finite : magnitude | 0x7f800000u;
  return bits_as<float>(bits | (x.bits & 0x8000u) << 16);
}

// Below 2^-14 the sum with 0.5 rounds to multiples of 2^-24 by itself; above, rounding carries into the exponent.
QSIM_HD Float16 round_to(Float16, float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const std::uint32_t subnormal =
      bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<std::uint32_t>(0.5f);
  const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const std::uint32_t rounded = magnitude < 0x38800000u ? subnormal : magnitude < 0x47800000u ? normal : special;
  return {static_cast<std::uint16_t>(rounded | (bits >> 16 & 0x8000u))};
}

// load_tile: the elements in arithmetic type, in `buffer` if they had to be converted.
inline const float* load_tile(const float* from, std::int64_t, float*) { return from; }
inline const double* load_tile(const double* from, std::int64_t, double*) { return from; }

inline const float* load_tile(const BFloat16* from, std::int64_t n, float* buffer) {
  for (std::int64_t i = 0; i < n; ++i) buffer[i] = to_float(from[i]);
  return buffer;
}

inline const float* load_tile(const Float16* from, std::int64_t n, float* buffer) {
  std::int64_t converted = 0;
#if defined(__F16C__)
  converted = n / 8 * 8;
  for (std::int64_t i = 0; i < converted; i += 8) {
    _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (std::int64_t i = converted; i < n; ++i) buffer[i] = to_float(from[i]);
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

inline void store_tile(const float* from, std::int64_t n, BFloat16* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = round_to(BFloat16{}, from[i]);
}

inline void store_tile(const float* from, std::int64_t n, Float16* to) {
  std::int64_t converted = 0;
#if defined(__F16C__)
  converted = n / 8 * 8;
  for (std::int64_t i = 0; i < converted; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (std::int64_t i = converted; i < n; ++i) to[i] = round_to(Float16{}, from[i]);
}

// Rounding to 16 bits can underflow to -0.0; a zero result is +0.0.
inline void drop_sign_of_zero(float*, std::int64_t) {}
inline void drop_sign_of_zero(double*, std::int64_t) {}
template <class Half>
void drop_sign_of_zero(Half* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i].bits = y[i].bits == 0x8000 ? 0 : y[i].bits;
}

}  // namespace
}  // namespace qsim::cpu
