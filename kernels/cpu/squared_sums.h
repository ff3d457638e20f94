// Sums of squares in float64 whose order is the same at every vector width.
#pragma once

#include <algorithm>

#include "float_registers.h"

namespace qsim::cpu {
namespace {

constexpr int kSums = 16, kDoubles = kVectorBytes / 8, kParts = kSums / kDoubles;  // element i joins sum i % 16

QSIM_INLINE Doubles as_doubles(const double* from) { return load_as<Doubles>(from); }
QSIM_INLINE Doubles as_doubles(const float* from) { return widen(load_as<HalfFloats>(from)); }

QSIM_INLINE Doubles add_square(Doubles sum, Doubles x, double) { return sum + x * x; }
QSIM_INLINE Doubles add_square(Doubles sum, Doubles x, float) {  // the square of a float32 is exact
  return Number<Doubles>::multiply_add(x, x, sum);
}

template <bool finite_only, class A>
SquaredSums sum_squares(const A* x, const A* errors, std::int64_t n) {
  Doubles error[kParts] = {}, signal[kParts] = {};
  const auto add = [&](const A* elements, const A* deviations) QSIM_INLINE_LAMBDA {
    for (int j = 0; j < kParts; ++j) {
      Doubles e = as_doubles(deviations + j * kDoubles), s = as_doubles(elements + j * kDoubles);
      if constexpr (finite_only) {
        const Longs finite = e - e == 0;
        e = (Doubles)((Longs)e & finite);
        s = (Doubles)((Longs)s & finite);
      }
      error[j] = add_square(error[j], e, A{});
      signal[j] = add_square(signal[j], s, A{});
    }
  };
  const std::int64_t whole = n - n % kSums;
  for (std::int64_t i = 0; i < whole; i += kSums) add(x + i, errors + i);
  if (whole < n) {
    A elements[kSums] = {}, deviations[kSums] = {};
    std::copy(x + whole, x + n, elements);
    std::copy(errors + whole, errors + n, deviations);
    add(elements, deviations);
  }
  SquaredSums sums;
  for (int i = 0; i < kSums; ++i) sums.merge({error[i / kDoubles][i % kDoubles], signal[i / kDoubles][i % kDoubles]});
  return sums;
}

// errors: x minus its rounded value. Elements that are not finite before or after rounding show in the sum, and are
// left out then.
template <class A>
SquaredSums squares_of(const A* x, const A* errors, std::int64_t n) {
  const SquaredSums optimistic = sum_squares<false>(x, errors, n);
  return optimistic.error - optimistic.error == 0 ? optimistic : sum_squares<true>(x, errors, n);
}

}  // namespace
}  // namespace qsim::cpu
