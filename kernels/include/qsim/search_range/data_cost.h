// The cost of an encoding on the data (methods mse and tf_enhanced): what it costs a value, in steps. The sum over
// values is one pass over the data per candidate.
//
// float32 values are placed to within 2^-23 of their distance from zero in steps, which an 8-bit grid does not notice.
#pragma once

#include "qsim/half_even.h"
#include "qsim/search_range.h"
#include "qsim/search_range/sums.h"

namespace qsim {

constexpr int kDataSums = 32;    // lanes of the sum over a chunk, those of a warp
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

// n values are summed by segments, as many as a block of a GPU takes, and within them by chunks. At most 1024 of them.
QSIM_HD std::int64_t cost_segment(std::int64_t n) {
  constexpr std::int64_t kShortest = 16 * kCostChunk, kMost = 1024;
  const std::int64_t chunks = (n + kMost * kCostChunk - 1) / (kMost * kCostChunk);
  return chunks * kCostChunk > kShortest ? chunks * kCostChunk : kShortest;
}

// The error in steps of values [begin, end), a segment; of_chunk(i, n) is that of n values from the i-th on. Ends where
// with the error `before` it costs more than `limit`, the squared scale being `square`.
template <class OfChunk>
QSIM_HD double error_of_segment(std::int64_t begin, std::int64_t end, double before, double square, double limit,
                                OfChunk of_chunk) {
  double sum = 0;
  for (std::int64_t i = begin; i < end && (before + sum) * square <= limit; i += kCostChunk) {
    sum += of_chunk(i, end - i < kCostChunk ? static_cast<int>(end - i) : kCostChunk);
  }
  return sum;
}

// What an encoding costs on n values, or more than `limit` when it is more.
template <class OfChunk>
QSIM_HD double cost_of_values(std::int64_t n, double scale, double limit, OfChunk of_chunk) {
  const double square = scale * scale;
  const std::int64_t segment = cost_segment(n);
  double sum = 0;
  for (std::int64_t begin = 0; begin < n && sum * square <= limit; begin += segment) {
    const std::int64_t end = n - begin < segment ? n : begin + segment;
    sum += error_of_segment(begin, end, sum, square, limit, of_chunk);
  }
  return sum * square;
}

// An end of a range as it is stored: zeros of either sign, which comparisons do not order, are +0.0.
template <class T>
QSIM_HD T stored_end(double end) {
  return static_cast<T>(end) + T{0};
}

template <class T>
struct FiniteValues {
  T lowest, highest;
  std::int64_t count;

  QSIM_HD Range with_zero() const { return {smaller(lowest, 0), larger(highest, 0)}; }
};

}  // namespace qsim
