// The gradients of scale and zero point (learned step sizes): the terms of elements, and their sums over a run of one
// parameter. learnable.cpp walks the runs and tables of a tensor with these.
//
// Sums are kept in lines (vector/sums.h), at most kTerms terms to each of a line's sums in the arithmetic type.
#pragma once

#include <algorithm>
#include <type_traits>

#include "fake_quantize/grids.h"
#include "vector/masks.h"
#include "vector/sums.h"

namespace qsim::cpu {
namespace {

// Terms that a lane adds in the arithmetic type before float64 takes over.
constexpr std::int64_t kTerms = 64;

// An element on its grid; in range where `before` equals `after`.
template <class A>
struct Placed {
  A quotient, steps, before, after;
};

template <Rounding rounding, class A>
QSIM_INLINE Placed<A> place(ByContract<rounding>, A x, const PreparedGrid<A>& grid) {
  const A quotient = ByContract<rounding>::quotient(x, grid), steps = nearest_steps(quotient, grid);
  return {quotient, steps, round_half_even(quotient), steps};
}

QSIM_INLINE Placed<float> place(ByThresholds, float x, const PreparedGrid<float>& grid) {
  const float clamped = clamp_keeping_nan(x, grid.lowest, grid.highest);
  const float quotient = ByThresholds::quotient(clamped, grid);
  return {quotient, round_half_even(quotient), x, clamped};
}

// A rule, the contract that it abbreviates, and whether the zero point is learned too.
template <class Base, class Exact, bool learns>
struct Learning : Base {
  using Contract = Exact;
  static constexpr bool learns_zero_point = learns;
};

template <class A>
struct LineSums {
  bool unknown() const {  // a NaN among the elements or the gradients
    mask_t<A> nan{};
    for (const auto& sum : scale) nan |= sum != sum;
    return any((Ints)nan);
  }

  register_t<A> scale[kLineRegisters]{}, zero_point[kLineRegisters]{};
};

// One register of a line of elements, of which the first `skip` were added before. The terms are those of scale_term
// and zero_point_term, but a NaN among x makes its sum NaN: callers look for that and turn to learn_few.
template <class Rule, class T, class GridOf>
QSIM_INLINE void learn_part(int part, const T* grad, const T* x, T* dx, const GridOf& grids, int skip,
                            register_t<arithmetic_t<T>>& scale_sums, register_t<arithmetic_t<T>>& zero_point_sums) {
  using A = arithmetic_t<T>;
  using Vector = register_t<A>;
  constexpr int n = kElements<A>;
  const int first = part * n;
  A elements[n], quotients[n], steps[n], before[n], after[n];
  store_as(elements, load_arithmetic(x + first));
#pragma GCC unroll 1  // the vectoriser wants a loop
  for (int j = 0; j < n; ++j) {
    const Placed<A> placed = place(Rule{}, elements[j], grids[first + j]);
    quotients[j] = placed.quotient;
    steps[j] = placed.steps;
    before[j] = placed.before;
    after[j] = placed.after;
  }
  const auto inside = load_as<Vector>(before) == load_as<Vector>(after);
  Vector gradient = load_arithmetic(grad + first);
  store_where(inside, grad + first, dx + first);
  if (skip != 0) gradient = lane_numbers<A>() >= skip - first ? gradient : Vector{};
  const Vector rounded = load_as<Vector>(steps), error = rounded - load_as<Vector>(quotients);
  scale_sums += gradient * (inside ? error : rounded);
  if constexpr (Rule::learns_zero_point) zero_point_sums = inside ? zero_point_sums : zero_point_sums + gradient;
}

template <class Rule, class T, class GridOf>
QSIM_INLINE void learn_line(const T* grad, const T* x, T* dx, const GridOf& grids, int skip,
                            LineSums<arithmetic_t<T>>& sums) {
  for (int part = 0; part < kLineRegisters; ++part) {
    learn_part<Rule>(part, grad, x, dx, grids, skip, sums.scale[part], sums.zero_point[part]);
  }
}

template <class A>
struct Sums {
  A scale = 0, zero_point = 0;
};

template <class Rule, class T, class A>
void learn_one(const T* grad, const T* x, T* dx, const PreparedGrid<A>& grid, Sums<A>& sums) {
  T padded[2][kElements<A>] = {{*grad}, {*x}};
  const A gradient = load_arithmetic(padded[0])[0], element = load_arithmetic(padded[1])[0];
  const A quotient = Rule::Contract::quotient(element, grid);
  sums.scale += scale_term(gradient, element, quotient, grid);
  sums.zero_point += zero_point_term(gradient, element, quotient, grid);
  *dx = in_range(quotient, grid) ? *grad : T{};
}

template <class A>
Sums<A> total(const Sums<A> (&lanes)[kLine<A>]) {
  A scale[kLine<A>], zero_point[kLine<A>];
  for (int i = 0; i < kLine<A>; ++i) {
    scale[i] = lanes[i].scale;
    zero_point[i] = lanes[i].zero_point;
  }
  return {sum_of_line<A>(scale), sum_of_line<A>(zero_point)};
}

// At most kTerms lines of one parameter; the last line overlaps the one before. One element at a time: for NaN among
// them, and for less than a line.
template <class Rule, class T, class A>
[[gnu::noinline]] Sums<A> learn_few(const T* grad, const T* x, T* dx, std::int64_t n, const PreparedGrid<A>& grid) {
  Sums<A> lanes[kLine<A>];
  for (std::int64_t i = 0; i < n; i += kLine<A>) {
    const std::int64_t at = std::max<std::int64_t>(0, std::min(i, n - kLine<A>));
    for (std::int64_t e = i; e < std::min(n, i + kLine<A>); ++e) {
      learn_one<Rule>(grad + e, x + e, dx + e, grid, lanes[e - at]);
    }
  }
  return total<A>(lanes);
}

template <class Rule, class T, class A>
QSIM_INLINE Sums<A> learn_run(const T* grad, const T* x, T* dx, std::int64_t n, const OneGrid<A>& grid) {
  if (n < kLine<A>) return learn_few<Rule>(grad, x, dx, n, grid.grid);
  LineSums<A> lanes;
  std::int64_t i = 0;
  for (; i + kLine<A> <= n; i += kLine<A>) learn_line<Rule>(grad + i, x + i, dx + i, grid, 0, lanes);
  if (i < n) {
    const std::int64_t last = n - kLine<A>;
    learn_line<Rule>(grad + last, x + last, dx + last, grid, static_cast<int>(i - last), lanes);
  }
  const Sums<A> sums = {sum_of_line<A>(lanes.scale), sum_of_line<A>(lanes.zero_point)};
  if (sums.scale == sums.scale) [[likely]]
    return sums;
  return learn_few<Rule>(grad, x, dx, n, grid.grid);
}

}  // namespace
}  // namespace qsim::cpu
