// One vector register of float32, loaded from any element type. Private to the per-level kernels.
//
// Vector extensions of g++ and clang: `a < b ? a : b` is one minps, which returns b when a is NaN.
#pragma once

#include <cmath>
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

QSIM_INLINE Floats all(float x) { return x - Floats{}; }  // of all operations with 0 the one that changes no x

// Conversions between widths, by intrinsics: g++ 12 makes of __builtin_convertvector up to twice the instructions, of
// which whole loops consist here. (The masked forms are those whose undefined source it does not warn of.)
typedef std::uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));  // half a register
typedef double Doubles __attribute__((vector_size(kVectorBytes)));

QSIM_INLINE Words widen(Shorts v) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)v);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Words);
#endif
}

QSIM_INLINE Shorts narrow(Words v) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)v);
#elif defined(__AVX2__)
  return (Shorts)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
#else
  return __builtin_convertvector(v, Shorts);
#endif
}

QSIM_INLINE Doubles widen(HalfFloats v) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)v);
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd((__m128)v);
#else
  return __builtin_convertvector(v, Doubles);
#endif
}

QSIM_INLINE HalfFloats narrow(Doubles v) {
#if defined(__AVX512F__)
  return (HalfFloats)_mm512_maskz_cvtpd_ps(0xff, (__m512d)v);
#elif defined(__AVX2__)
  return (HalfFloats)_mm256_cvtpd_ps((__m256d)v);
#else
  return __builtin_convertvector(v, HalfFloats);
#endif
}

QSIM_INLINE Floats load(const float* from) { return load_as<Floats>(from); }

QSIM_INLINE Floats load(const BFloat16* from) { return (Floats)(widen(load_as<Shorts>(from)) << 16); }

QSIM_INLINE Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  // Exponent and mantissa moved into place are too small by 2^112, subnormals included; what reaches 2^16 was Inf or
  // NaN.
  const Words half = widen(load_as<Shorts>(from));
  const Floats magnitude = (Floats)((half & 0x7fff) << 13) * 0x1p112f;
  const Words exponent = (Words)(magnitude >= 0x1p16f) & 0x7f800000;
  return (Floats)((Words)magnitude | exponent | (half & 0x8000) << 16);
#endif
}

QSIM_INLINE Floats load(const double* from) {
  const HalfFloats halves[2] = {narrow(load_as<Doubles>(from)), narrow(load_as<Doubles>(from + kWidth / 2))};
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

template <class Vector>
QSIM_INLINE void store_as(void* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

QSIM_INLINE void store(float* to, Floats v) { store_as(to, v); }

// Of finite numbers, rounded to nearest even.
QSIM_INLINE void store(BFloat16* to, Floats v) {
  const Words bits = (Words)v;
  store_as(to, narrow((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

// Of finite numbers, rounded to nearest even.
QSIM_INLINE void store(Float16* to, Floats v) {
#if defined(__AVX512F__)
  store_as(to, _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  store_as(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  // Adding 2^13 times the leading power of two (2^-14 at least) rounds to 11 bits, or to multiples of the smallest
  // half; what is left is exact.
  const Words magnitude = (Words)v & 0x7fffffff, exponent = magnitude & 0x7f800000;
  const Words least = (Words)all(0x1p-14f);
  const Floats rounder = (Floats)((exponent > least ? exponent : least) + (13 << 23));
  const Floats rounded = (Floats)magnitude + rounder - rounder;
  store_as(to, narrow((Words)(rounded * 0x1p-112f) >> 13 | ((Words)v >> 16 & 0x8000)));
#endif
}

QSIM_INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
QSIM_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// x rounded to integers, half to even, and clamped: by intrinsics, because g++ makes compares and masked moves of the
// comparisons. NaN is kept: maxps and minps return their second operand then.
QSIM_INLINE Floats clamped(Floats x, Floats low, Floats high) {
#if defined(__AVX512F__)
  const __m512 raised = _mm512_maskz_max_ps(0xffff, (__m512)low, (__m512)x);
  return (Floats)_mm512_maskz_min_ps(0xffff, (__m512)high, raised);
#elif defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)high, _mm256_max_ps((__m256)low, (__m256)x));
#else
  x = low > x ? low : x;
  return high < x ? high : x;
#endif
}

QSIM_INLINE Floats rounded(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  for (int i = 0; i < kWidth; ++i) x[i] = rintf(x[i]);
  return x;
#endif
}

#if defined(__AVX2__) || defined(__ARM_FEATURE_FMA)
constexpr bool kFusedMultiplyAdd = true;
#else
constexpr bool kFusedMultiplyAdd = false;  // fmaf would be a call
#endif

// a * b + c, rounded once.
QSIM_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < kWidth; ++i) a[i] = fmaf(a[i], b[i], c[i]);
  return a;
#endif
}

QSIM_INLINE bool any(Ints mask) {
  std::int64_t words[kVectorBytes / 8], joined = 0;
  std::memcpy(words, &mask, sizeof words);
  for (std::int64_t word : words) joined |= word;
  return joined != 0;
}

}  // namespace
}  // namespace qsim::cpu
