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
QSIM_HD N exact_quotient(N x, N scale, N inverse) {
  const N product = x * inverse;
  return Number<N>::fused(Number<N>::fused(-product, scale, x), inverse, product);
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

}  // namespace qsim
