// x / scale without dividing, and the last x that rounds into a grid: the same bits as the contract, for regular grids.
#pragma once

#include <cstdint>

#include "qsim/fake_quantize.h"

namespace qsim {

// Grids for which the functions below are exact: no product overflows, and none that matters underflows. Others are
// legal; they take the functors of fake_quantize.h as they are.
QSIM_HD bool is_regular(Grid<float> grid) {  // without branches, as everything here
  return (grid.scale >= 0x1p-100f) & (grid.scale <= 0x1p24f) & (grid.low >= -0x1p21f) & (grid.high <= 0x1p21f);
}

// RN(x / scale) for inverse = RN(1 / scale), a regular scale and x within the thresholds of its grid: one correction of
// the product by its remainder (Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000
// processor"). The theorem asks for a product within one ulp; here it is within 1.5, which is enough for every scale:
// the test visits all divisors with all dividends whose quotients lie so close to a midpoint that they could go wrong.
// Below |x| = 2^-100 the remainder underflows and the last bits may be off; such quotients round to 0 all the same.
template <class N>
QSIM_HD N corrected_quotient(N product, N x, N scale, N inverse) {
  return Number<N>::fused(Number<N>::fused(-product, scale, x), inverse, product);
}
template <class N>
QSIM_HD N exact_quotient(N x, N scale, N inverse) {
  return corrected_quotient(x * inverse, x, scale, inverse);
}

// A positive float, so many floats further up.
QSIM_HD float floats_above(float x, std::int32_t count) { return number_of<float>(bits_of(x) + count); }

// The largest x with rint(RN(x / scale)) <= steps, for 0 <= steps <= 2^21 and a regular scale. The tie steps + 0.5
// rounds down if steps is even, and so does all that RN makes a tie of: what lies up to the midpoint between the tie
// and the float above it, inclusive because the tie has an even mantissa. If steps is odd, x / scale must lie below the
// midpoint between the tie and the float below it. Midpoint times scale has 49 bits: exact in float64.
QSIM_HD float last_within(float steps, float scale) {
  const std::int32_t odd = 2 * round_half_even(steps / 2) != steps ? 1 : 0;
  const float tie = steps + 0.5f;
  const double limit = (double{tie} + double{floats_above(tie, 1 - 2 * odd)}) * 0.5 * double{scale};
  const float nearest = static_cast<float>(limit), below = floats_above(nearest, -1);
  const float least = double{nearest} >= limit ? below : nearest, most = double{nearest} > limit ? below : nearest;
  return odd ? least : most;
}

// The first and last x that round into a regular grid.
struct Thresholds {
  float lowest, highest;
};
QSIM_HD Thresholds thresholds(Grid<float> grid) {
  return {-last_within(-grid.low, grid.scale), last_within(grid.high, grid.scale)};
}

// What quantize_regular reads of a regular grid, or of a register of them. lowest and highest: its thresholds, or the
// values of its ends, which give the same values and say less of what is in range.
template <class N>
struct RegularGrid {
  N scale, inverse, lowest, highest;
};

// An element is in range where the clamp left alone what it was given; NaN, which equals nothing, is not.
template <class N>
struct Quantized {
  N value, before_clamp, after_clamp;
};

// What is clamped to the thresholds rounds into the grid, without a second clamp. GridOfN: RegularGrid<N>, or what has
// its members.
template <class N, class GridOfN>
QSIM_HD Quantized<N> quantize_regular(N x, const GridOfN& grid) {
  const N clamped = Number<N>::clamped(x, grid.lowest, grid.highest);
  const N steps = round_few_half_even(exact_quotient(clamped, grid.scale, grid.inverse));
  return {Number<N>::fused(steps, grid.scale, N{}), x, clamped};
}

// The same for a grid that too few elements share for its thresholds to be worth their float64: the steps are clamped
// instead. A product is first brought within 2^22, far beyond every regular grid, so that neither it nor its correction
// overflows to NaN: what it was beyond that comes back with the correction, rounded to some steps beyond the grid.
QSIM_HD Quantized<float> quantize_regular_steps(float x, Grid<float> grid, float inverse) {
  const float product = clamp_keeping_nan(x * inverse, -0x1p22f, 0x1p22f);
  const float nearest = round_few_half_even(corrected_quotient(product, x, grid.scale, inverse));
  const float steps = clamp_keeping_nan(nearest, grid.low, grid.high);
  return {fmaf(steps, grid.scale, 0.f), nearest, steps};
}

}  // namespace qsim
