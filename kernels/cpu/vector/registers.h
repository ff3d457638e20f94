// Vector registers: types, loads from any element type, stores, and what has no operator. Included by all loops that
// are written with vectors. Everything here has internal linkage, as in every file that is compiled per level.
//
// Vector extensions of g++ and clang: `a < b ? a : b` is one minps, which returns b when a is NaN. Intrinsics stand
// only where the compiler makes more instructions of the extension than the processor has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "qsim/element.h"
#include "qsim/number.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define QSIM_INLINE inline __attribute__((always_inline))
#define QSIM_INLINE_LAMBDA __attribute__((always_inline))

// Iterations are independent although the pointers may be equal (in-place calls): no run-time overlap check, which
// would send equal pointers to the scalar loop.
#if defined(__clang__)
#define QSIM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__SANITIZE_ADDRESS__)
#define QSIM_INDEPENDENT  // checks may leave GCC no loop to annotate, of which it warns
#else
#define QSIM_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace qsim::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kFloats = kRegisterBytes / 4, kDoubles = kRegisterBytes / 8;  // in a register

template <class A, int bytes>
struct VectorOf {
  typedef A type __attribute__((vector_size(bytes)));
};

typedef float Floats __attribute__((vector_size(kRegisterBytes)));
typedef double Doubles __attribute__((vector_size(kRegisterBytes)));
typedef std::int32_t Ints __attribute__((vector_size(kRegisterBytes)));
typedef std::int64_t Longs __attribute__((vector_size(kRegisterBytes)));
typedef std::uint32_t Words __attribute__((vector_size(kRegisterBytes)));
typedef std::uint16_t Shorts __attribute__((vector_size(kRegisterBytes / 2)));  // half a register
typedef float HalfFloats __attribute__((vector_size(kRegisterBytes / 2)));

// Of an element type: the register that it is computed in, how many elements that holds, and lanes of -1 or 0.
template <class T>
using register_t = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;
template <class T>
constexpr int kElements = std::is_same_v<T, double> ? kDoubles : kFloats;
template <class T>
using mask_t = decltype(register_t<T>{} == register_t<T>{});

template <class Vector>
QSIM_INLINE Vector load_as(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class Vector>
QSIM_INLINE void store_as(void* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

QSIM_INLINE Floats all(float x) { return x - Floats{}; }  // of all operations with 0 the one that changes no x

// Conversions between widths, by intrinsics: g++ 12 makes of __builtin_convertvector up to twice the instructions, of
// which whole loops consist here. (The masked forms are those whose undefined source it does not warn of.)
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

// load: elements of any type as float32.
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
  const HalfFloats halves[2] = {narrow(load_as<Doubles>(from)), narrow(load_as<Doubles>(from + kDoubles))};
  return load_as<Floats>(halves);
}

// One element, for what is left over at the end of a row.
template <class T>
QSIM_INLINE float load_one(const T* from) {
  T padded[kFloats] = {*from};
  return load(padded)[0];
}
template <>
QSIM_INLINE float load_one(const float* from) {
  return *from;
}

// load_arithmetic: elements in the type that they are computed in.
QSIM_INLINE Doubles load_arithmetic(const double* from) { return load_as<Doubles>(from); }
template <class T>
QSIM_INLINE Floats load_arithmetic(const T* from) {
  return load(from);
}

// Stores of 16-bit elements round: half_even.h.
QSIM_INLINE void store(float* to, Floats v) { store_as(to, v); }
QSIM_INLINE void store(double* to, Doubles v) { store_as(to, v); }

// b where a is NaN.
QSIM_INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
QSIM_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

#if defined(__AVX2__) || defined(__ARM_FEATURE_FMA)
constexpr bool kFusedMultiplyAdd = true;
#else
constexpr bool kFusedMultiplyAdd = false;  // fmaf would be a call
#endif

// 0, 1, 2, ...
template <class T>
QSIM_INLINE mask_t<T> lane_numbers() {
  mask_t<T> numbers;
  for (int i = 0; i < kElements<T>; ++i) numbers[i] = i;
  return numbers;
}

QSIM_INLINE bool any(Ints mask) {
  std::int64_t words[kRegisterBytes / 8], joined = 0;
  std::memcpy(words, &mask, sizeof words);
  for (std::int64_t word : words) joined |= word;
  return joined != 0;
}

}  // namespace
}  // namespace qsim::cpu

namespace qsim {

template <>
struct Number<cpu::Floats> {
  using Floats = cpu::Floats;
  using Bits = cpu::Ints;

  static QSIM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    if constexpr (!cpu::kFusedMultiplyAdd) return a * b + c;
    return fused(a, b, c);
  }

  static QSIM_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < cpu::kFloats; ++i) a[i] = fmaf(a[i], b[i], c[i]);
    return a;
#endif
  }

  // By intrinsics, because g++ makes compares and masked moves of the comparisons. NaN is kept: maxps and minps return
  // their second operand then.
  static QSIM_INLINE Floats clamped(Floats x, Floats low, Floats high) {
#if defined(__AVX512F__)
    const __m512 raised = _mm512_maskz_max_ps(0xffff, (__m512)low, (__m512)x);
    return (Floats)_mm512_maskz_min_ps(0xffff, (__m512)high, raised);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)high, _mm256_max_ps((__m256)low, (__m256)x));
#else
    return clamp_keeping_nan(x, low, high);
#endif
  }
};

template <>
struct Number<cpu::Doubles> {
  using Doubles = cpu::Doubles;
  using Bits = cpu::Longs;

  static QSIM_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
    return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
  }
};

}  // namespace qsim
