// How elements are quantized: by the contract to the letter, or by a short cut that gives the same bits.
#pragma once

#include "fake_quantize_runs.h"
#include "float_vector.h"
#include "qsim/exact_quotient.h"

namespace qsim {
template <>
struct Lanes<cpu::Floats> {
  using Floats = cpu::Floats;
  QSIM_HD static Floats fused(Floats a, Floats b, Floats c) { return cpu::fused(a, b, c); }
  QSIM_HD static Floats rounded(Floats x) { return cpu::rounded(x); }
  QSIM_HD static Floats clamped(Floats x, Floats low, Floats high) { return cpu::clamped(x, low, high); }
};
}  // namespace qsim

namespace qsim::cpu {
namespace {

// An element is in range where the clamp left alone what it was given; NaN, which equals nothing, is not.
template <class V>
struct Quantized {
  V value, before_clamp, after_clamp;
};

// Any grid, one element at a time. RN(1 / scale) of the `reciprocal` profile was computed once.
template <Rounding rounding>
struct ByContract {
  template <class T>
  QSIM_HD static T quotient(T x, const Entry<T>& grid) {
    return rounding == Rounding::divide ? x / grid.scale : x * grid.inverse;
  }
  template <class T>
  QSIM_HD static Quantized<T> quantize(T x, const Entry<T>& grid) {
    const T exact = quotient(x, grid), steps = nearest_steps(exact, grid);
    return {dequantize(steps, grid.scale), round_half_even(exact), steps};
  }
};

// Regular grids and rounding `divide`: what is clamped to the thresholds rounds into the grid, without a second clamp.
// V: float, or Floats with a grid of such vectors.
struct ByThresholds {
  template <class V, class GridOfV>
  QSIM_HD static V quotient(V x, const GridOfV& grid) {
    if constexpr (!kFusedMultiplyAdd) return x / grid.scale;
    return exact_quotient(x, grid.scale, grid.inverse);
  }
  template <class V, class GridOfV>
  QSIM_HD static Quantized<V> quantize(V x, const GridOfV& grid) {
    const V clamped = Lanes<V>::clamped(x, grid.lowest, grid.highest);
    const V steps = Lanes<V>::rounded(quotient(clamped, grid));
    if constexpr (!kFusedMultiplyAdd) return {steps * grid.scale + V{}, x, clamped};
    return {Lanes<V>::fused(steps, grid.scale, V{}), x, clamped};
  }
};

// What ByThresholds reads, a vector of each.
struct VectorGrid {
  Floats scale, inverse, lowest, highest;
};
QSIM_INLINE VectorGrid vectors(const OneGrid<float>& one) {
  const Entry<float>& grid = one.grid;
  return {all(grid.scale), all(grid.inverse), all(grid.lowest), all(grid.highest)};
}
QSIM_INLINE VectorGrid vectors(const GridPerElement<float>& per_element) {
  const Grids<float>& grids = per_element.grids;
  return {load(grids.scale), load(grids.inverse), load(grids.lowest), load(grids.highest)};
}

// A vector of elements and the grids from that of the first on.
template <class Rule, class GridOf>
QSIM_INLINE Quantized<Floats> quantize(Rule, Floats x, const GridOf& grids) {
  float elements[kWidth], values[kWidth], before[kWidth], after[kWidth];
  store(elements, x);
#pragma GCC unroll 1  // the vectoriser wants a loop
  for (int j = 0; j < kWidth; ++j) {
    const Quantized<float> one = Rule::quantize(elements[j], grids[j]);
    values[j] = one.value;
    before[j] = one.before_clamp;
    after[j] = one.after_clamp;
  }
  return {load(values), load(before), load(after)};
}
template <class GridOf>
QSIM_INLINE Quantized<Floats> quantize(ByThresholds, Floats x, const GridOf& grids) {
  return ByThresholds::quantize(x, vectors(grids));
}

}  // namespace
}  // namespace qsim::cpu
