// The cost of an encoding on the data (methods mse and tf_enhanced): what it costs a value, in steps. The sum over
// values is one pass over the data per candidate.
//
// float32 values are placed to within 2^-23 of their distance from zero in steps, which an 8-bit grid does not notice.
#pragma once

#include "qsim/half_even.h"
#include "qsim/search_range.h"

namespace qsim {

constexpr int kDataSums = 32;    // partial sums: the same order at every vector width and in a warp
constexpr int kCostChunk = 256;  // values between two looks at whether the candidate can still win

template <class T>
QSIM_HD T finite_or_zero(T x) {  // zero is exact on every grid
  return is_finite(x) ? x : T{0};
}

// The squared error in steps on the grid low, low + 1, .. high; of values that round off it, which weighs gamma. They
// are more than half a step away. T may be a vector: one candidate in each element.
template <class T>
struct StepError {
  T inverse_scale, low, high, gamma;

  QSIM_HD T of(T value) const {
    const T t = value * inverse_scale, nearest = round_half_even(t);
    const T from_low = nearest < low ? low : nearest, number = from_low > high ? high : from_low;
    const T error = t - number, square = error * error;
    return square > T{} + 0.25F ? gamma * square : square;
  }
};

template <class T>
QSIM_HD StepError<T> step_error(QuantParams<T> params, const RangeSearch& search) {
  return {1 / params.scale, static_cast<T>(static_cast<double>(search.grid.quant_min) - params.zero_point),
          static_cast<T>(static_cast<double>(search.grid.quant_max) - params.zero_point), static_cast<T>(search.gamma)};
}

template <class T>
struct FiniteValues {
  T lowest, highest;
  std::int64_t count;

  QSIM_HD Range with_zero() const { return {smaller(lowest, 0), larger(highest, 0)}; }
};

}  // namespace qsim
