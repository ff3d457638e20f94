// Loops over registers of elements in their arithmetic type: float32 for the 16-bit formats.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float_vector.h"
#include "half_tiles.h"
#include "qsim/round_to_format.h"

namespace qsim {

namespace {
typedef std::int64_t Longs __attribute__((vector_size(cpu::kVectorBytes)));
}

template <>
struct Number<cpu::Floats> {
  using Bits = cpu::Ints;
  static QSIM_INLINE cpu::Floats multiply_add(cpu::Floats a, cpu::Floats b, cpu::Floats c) {
#if defined(__AVX512F__)
    return (cpu::Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (cpu::Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
  }
};
template <>
struct Number<cpu::Doubles> {
  using Bits = Longs;
  static QSIM_INLINE cpu::Doubles multiply_add(cpu::Doubles a, cpu::Doubles b, cpu::Doubles c) {
#if defined(__AVX512F__)
    return (cpu::Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (cpu::Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
  }
};

namespace cpu {
namespace {

#define QSIM_INLINE_LAMBDA __attribute__((always_inline))

template <class T>
using register_t = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;
template <class T>
constexpr std::int64_t kLanes = sizeof(register_t<T>) / sizeof(arithmetic_t<T>);

QSIM_INLINE Doubles load_register(const double* from) { return load_as<Doubles>(from); }
template <class T>
QSIM_INLINE Floats load_register(const T* from) {
  return load(from);
}

QSIM_INLINE void store_register(double* to, Doubles v) { store_as(to, v); }
QSIM_INLINE void store_register(float* to, Floats v) { store_as(to, v); }
QSIM_INLINE void store_register(Float16* to, Floats v) { round_to(to, v); }  // the bfloat16 65536 becomes Inf
QSIM_INLINE void store_register(BFloat16* to, Floats v) { store_as(to, narrow((Words)v >> 16)); }  // exact: format_in

// Calls f(i, elements from i on, how many) for every whole register, and for what is left padded with zeros.
template <class T, class F>
QSIM_INLINE void for_each_register(const T* x, std::int64_t n, F f) {
  const std::int64_t whole = n - n % kLanes<T>;
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < whole; i += kLanes<T>) f(i, load_register(x + i), kLanes<T>);
  if (whole == n) return;
  T rest[kLanes<T>] = {};
  std::memcpy(rest, x + whole, static_cast<std::size_t>(n - whole) * sizeof(T));
  f(whole, load_register(rest), n - whole);
}

// What has been multiplied by a scale is no longer a number of the format, nor of the element type.
template <class T, class Scale>
QSIM_INLINE void store_result(T* to, register_t<T> v, Scale) {
  store_register(to, v);
}
QSIM_INLINE void store_result(BFloat16* to, Floats v, Floats) { round_to(to, v); }

template <class T, class Scale>
QSIM_INLINE void store_first(T* to, register_t<T> v, std::int64_t n, Scale scale) {
  if (n == kLanes<T>) return store_result(to, v, scale);
  T all[kLanes<T>];
  store_result(all, v, scale);
  std::memcpy(to, all, static_cast<std::size_t>(n) * sizeof(T));
}

}  // namespace
}  // namespace cpu
}  // namespace qsim
