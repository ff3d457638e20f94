// Elements by registers, and their scales: none, one for a run, or one each. The loops of round_to_format.cpp walk
// these.
#pragma once

#include <algorithm>

#include "layout.h"
#include "qsim/round_to_format.h"
#include "vector/half_even.h"

namespace qsim::cpu {
namespace {

template <class N, class A>
QSIM_INLINE FormatIn<N> in_every_lane(const FormatIn<A>& format) {
  const auto bits = [](bits_t<A> b) { return bits_t<N>{} + b; };
  return {bits(format.magnitude), bits(format.infinity), bits(format.smallest_normal), bits(format.overflow),
          bits(format.beyond),    bits(format.normal),   bits(format.vanishing),       N{} + format.overflowing,
          N{} + format.lift,      format.upper_half};
}

// at(i, n): the scales of elements i .. i + n of a run, n <= kElements, in a register.
struct NoScale {
  QSIM_INLINE Unscaled at(std::int64_t, std::int64_t) const { return {}; }
};

template <class T>
struct OneScale {
  register_t<T> scale;
  QSIM_INLINE register_t<T> at(std::int64_t, std::int64_t) const { return scale; }
  QSIM_INLINE OneScale after(std::int64_t) const { return *this; }
};

template <class T>
struct ScalePerElement {
  const arithmetic_t<T>* scales;
  QSIM_INLINE register_t<T> at(std::int64_t i, std::int64_t n) const {
    if (n >= kElements<T>) return load_arithmetic(scales + i);
    arithmetic_t<T> padded[kElements<T>];
    std::fill_n(padded, kElements<T>, arithmetic_t<T>(1));
    std::copy_n(scales + i, std::max<std::int64_t>(n, 0), padded);
    return load_arithmetic(padded);
  }
  QSIM_INLINE ScalePerElement after(std::int64_t n) const { return {scales + n}; }
};

// The table of parameters that layout.h walks.
template <class T>
struct ScaleTable {
  const arithmetic_t<T>* scales;
  QSIM_INLINE OneScale<T> shared(std::int64_t parameter) const { return {register_t<T>{} + scales[parameter]}; }
  QSIM_INLINE ScalePerElement<T> per_element(std::int64_t parameter) const { return {scales + parameter}; }
};

// Both call run(first element, elements, scales) for the runs of [begin, end).
struct OneRun {
  template <class Run>
  QSIM_INLINE void operator()(std::int64_t begin, std::int64_t end, Run run) const {
    run(begin, end - begin, NoScale());
  }
};

template <class T>
struct ScaledRuns {
  FormatScales<arithmetic_t<T>> scales;
  template <class Run>
  QSIM_INLINE void operator()(std::int64_t begin, std::int64_t end, Run run) const {
    for_each_run(scales.layout, ScaleTable<T>{scales.scale}, begin, end, INT64_MAX, run);
  }
};

// Calls f(i, elements from i on, how many) for every whole register, and for what is left padded with zeros.
template <class T, class F>
QSIM_INLINE void for_each_register(const T* x, std::int64_t n, F f) {
  const std::int64_t whole = n - n % kElements<T>;
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < whole; i += kElements<T>) f(i, load_arithmetic(x + i), kElements<T>);
  if (whole == n) return;
  T rest[kElements<T>] = {};
  std::memcpy(rest, x + whole, static_cast<std::size_t>(n - whole) * sizeof(T));
  f(whole, load_arithmetic(rest), n - whole);
}

// Without a scale the result is a number that bfloat16 has (format_in); in float16 the bfloat16 number 65536 becomes
// Inf.
template <class T, class Scale>
QSIM_INLINE void store_rounded(T* to, register_t<T> v, Scale) {
  round_to(to, v);
}
QSIM_INLINE void store_rounded(BFloat16* to, Floats v, Unscaled) { store_as(to, narrow((Words)v >> 16)); }

template <class T, class Scale>
QSIM_INLINE void store_first(T* to, register_t<T> v, std::int64_t n, Scale scale) {
  if (n == kElements<T>) return store_rounded(to, v, scale);
  T all[kElements<T>];
  store_rounded(all, v, scale);
  std::memcpy(to, all, static_cast<std::size_t>(n) * sizeof(T));
}

template <bool upper_half, class N, class Scale>
QSIM_INLINE N round_scaled(N quotient, Scale scale, const FormatIn<N>& format) {
  return multiplied(round_to_format<upper_half>(quotient, format), scale);
}

template <bool upper_half, class T, class Scales>
QSIM_INLINE void round_run(const T* x, T* y, std::int64_t n, Scales scales, const FormatIn<register_t<T>>& format) {
  for_each_register(x, n, [&](std::int64_t i, auto v, std::int64_t lanes) QSIM_INLINE_LAMBDA {
    const auto scale = scales.at(i, lanes);
    store_first(y + i, round_scaled<upper_half>(divided(v, scale), scale, format), lanes, scale);
  });
}

}  // namespace
}  // namespace qsim::cpu
