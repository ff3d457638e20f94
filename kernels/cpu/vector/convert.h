// Arrays of elements in the type that they are computed in: the memory itself where it holds that type, otherwise a
// copy in a buffer. For loops over plain arrays, which the compiler vectorises.
#pragma once

#include "half_even.h"
#include "registers.h"

namespace qsim::cpu {
namespace {

// How many 16-bit elements are converted at a time: few, so that the processor overlaps converting some with computing
// others. float32 and float64 are computed where they lie, as long as a run lasts.
template <class T>
constexpr bool kInMemory = sizeof(T) == sizeof(arithmetic_t<T>);
template <class T>
constexpr std::int64_t kLongestRun = kInMemory<T> ? INT64_MAX : 256;
template <class T>
constexpr std::int64_t kBuffer = kInMemory<T> ? 1 : 256;

// n elements of x as A, in `buffer` if they have to be converted.
QSIM_INLINE const float* converted(const float* x, std::int64_t, float*) { return x; }
QSIM_INLINE const double* converted(const double* x, std::int64_t, double*) { return x; }
template <class T>
QSIM_INLINE const float* converted(const T* x, std::int64_t n, float* buffer) {
  const std::int64_t whole = n - n % kFloats;
  for (std::int64_t i = 0; i < whole; i += kFloats) store(buffer + i, load(x + i));
  for (std::int64_t i = whole; i < n; ++i) buffer[i] = load_one(x + i);
  return buffer;
}

// Where to compute results that store_converted then brings to `to`.
QSIM_INLINE float* results_for(float* to, float*) { return to; }
QSIM_INLINE double* results_for(double* to, double*) { return to; }
template <class Half>
QSIM_INLINE float* results_for(Half*, float* buffer) {
  return buffer;
}

QSIM_INLINE void store_converted(const float*, std::int64_t, float*) {}
QSIM_INLINE void store_converted(const double*, std::int64_t, double*) {}
template <class Half>
void store_converted(const float* from, std::int64_t n, Half* to) {
  const std::int64_t whole = n - n % kFloats;
  for (std::int64_t i = 0; i < whole; i += kFloats) round_to(to + i, load(from + i));
  if (whole == n) return;
  float rest[kFloats] = {};
  Half rounded[kFloats];
  std::memcpy(rest, from + whole, static_cast<std::size_t>(n - whole) * sizeof(float));
  round_to(rounded, load(rest));
  std::memcpy(to + whole, rounded, static_cast<std::size_t>(n - whole) * sizeof(Half));
}

}  // namespace
}  // namespace qsim::cpu
