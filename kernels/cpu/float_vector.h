// One vector register of float32, loaded from any element type. Private to the per-level kernels.
//
// Vector extensions of g++ and clang: `a < b ? a : b` is one minps, which returns b when a is NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "qsim/half.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace qsim::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kWidth = kVectorBytes / 4;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));

#define QSIM_INLINE inline __attribute__((always_inline))

template <class Vector>
QSIM_INLINE Vector load_as(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

QSIM_INLINE Floats all(float x) { return Floats{} + x; }

QSIM_INLINE Words widen(const std::uint16_t* from) {
  typedef std::uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
  return __builtin_convertvector(load_as<Shorts>(from), Words);
}

QSIM_INLINE Floats load(const float* from) { return load_as<Floats>(from); }

QSIM_INLINE Floats load(const BFloat16* from) { return (Floats)(widen(&from->bits) << 16); }

QSIM_INLINE Floats load(const Float16* from) {
#if defined(__AVX512F__)
  // The masked form: g++ 12 warns of the other one's undefined source.
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  // Exponent and mantissa moved into place are too small by 2^112, subnormals included; what reaches 2^16 was Inf or
  // NaN.
  const Words half = widen(&from->bits);
  const Floats magnitude = (Floats)((half & 0x7fff) << 13) * 0x1p112f;
  const Words exponent = (Words)(magnitude >= 0x1p16f) & 0x7f800000;
  return (Floats)((Words)magnitude | exponent | (half & 0x8000) << 16);
#endif
}

QSIM_INLINE Floats load(const double* from) {
  typedef double Doubles __attribute__((vector_size(kVectorBytes)));
  typedef float HalfOfFloats __attribute__((vector_size(kVectorBytes / 2)));
  const HalfOfFloats halves[2] = {__builtin_convertvector(load_as<Doubles>(from), HalfOfFloats),
                                  __builtin_convertvector(load_as<Doubles>(from + kWidth / 2), HalfOfFloats)};
  return load_as<Floats>(halves);
}

// One element, for what is left over at the end of a row.
template <class T>
QSIM_INLINE float load_one(const T* from) {
  T padded[kWidth] = {*from};
  return load(padded)[0];
}
template <>
QSIM_INLINE float load_one(const float* from) {
  return *from;
}

QSIM_INLINE void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

QSIM_INLINE void narrow(std::uint16_t* to, Words v) {
  typedef std::uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
  const Shorts shorts = __builtin_convertvector(v, Shorts);
  std::memcpy(to, &shorts, sizeof shorts);
}

// Of finite numbers, rounded to nearest even.
QSIM_INLINE void store(BFloat16* to, Floats v) {
  const Words bits = (Words)v;
  narrow(&to->bits, (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Of finite numbers, rounded to nearest even.
QSIM_INLINE void store(Float16* to, Floats v) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#elif defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#else
  // Adding 2^13 times the leading power of two (2^-14 at least) rounds to 11 bits, or to multiples of the smallest
  // half; what is left is exact.
  const Words magnitude = (Words)v & 0x7fffffff, exponent = magnitude & 0x7f800000;
  const Words least = (Words)all(0x1p-14f);
  const Floats rounder = (Floats)((exponent > least ? exponent : least) + (13 << 23));
  const Floats rounded = (Floats)magnitude + rounder - rounder;
  narrow(&to->bits, (Words)(rounded * 0x1p-112f) >> 13 | ((Words)v >> 16 & 0x8000));
#endif
}

QSIM_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
QSIM_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

QSIM_INLINE bool any(Ints mask) {
  std::int64_t words[kVectorBytes / 8], joined = 0;
  std::memcpy(words, &mask, sizeof words);
  for (std::int64_t word : words) joined |= word;
  return joined != 0;
}

}  // namespace
}  // namespace qsim::cpu
