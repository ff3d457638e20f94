// The grids of elements, as their run has them, and how an element is quantized on its grid: by the contract to the
// letter, or by thresholds, a short cut that gives the same bits. Used by the loops of fake-quantize, forward and
// backward, and of quantize.
#pragma once

#include "layout.h"
#include "qsim/exact_quotient.h"
#include "qsim/fake_quantize.h"
#include "vector/half_even.h"

namespace qsim::cpu {
namespace {

// What the arrays of Grids say about one parameter.
template <class T>
struct PreparedGrid : Grid<T> {
  T inverse, lowest, highest;
};

template <class T>
QSIM_INLINE PreparedGrid<T> grid_at(const Grids<T>& grids, std::int64_t i) {
  return {{grids.scale[i], grids.low[i], grids.high[i]}, grids.inverse[i], grids.lowest[i], grids.highest[i]};
}

// Grids for the elements of a run: one for all, or one each. [i] is that of element i.
template <class T>
struct OneGrid {
  static constexpr bool kShared = true;  // neighbours share it
  PreparedGrid<T> grid;
  QSIM_INLINE PreparedGrid<T> operator[](std::int64_t) const { return grid; }
  QSIM_INLINE OneGrid after(std::int64_t) const { return *this; }
};

template <class T>
struct GridPerElement {
  static constexpr bool kShared = false;
  Grids<T> grids;
  QSIM_INLINE PreparedGrid<T> operator[](std::int64_t i) const { return grid_at(grids, i); }
  QSIM_INLINE GridPerElement after(std::int64_t n) const { return {offset(grids, n)}; }
};

// For `size` elements each.
template <int size>
struct GridPerBlock {
  static constexpr bool kShared = true;
  Grids<float> grids;
  QSIM_INLINE OneGrid<float> after(int n) const { return {grid_at(grids, n / size)}; }
};

template <class T>
QSIM_INLINE OneGrid<T> shared_grid(const Grids<T>& grids, std::int64_t parameter) {
  return {grid_at(grids, parameter)};
}
template <class T>
QSIM_INLINE GridPerElement<T> grids_from(const Grids<T>& grids, std::int64_t parameter) {
  return {offset(grids, parameter)};
}

// The table of parameters that layout.h walks.
template <class T>
struct GridTable {
  const Grids<T>& grids;
  QSIM_INLINE OneGrid<T> shared(std::int64_t parameter) const { return shared_grid(grids, parameter); }
  QSIM_INLINE GridPerElement<T> per_element(std::int64_t parameter) const { return grids_from(grids, parameter); }
};
template <class T>
GridTable(const Grids<T>&) -> GridTable<T>;

// The grids of a register of elements.
using RegisterGrid = RegularGrid<Floats>;
QSIM_INLINE RegisterGrid in_registers(const OneGrid<float>& one) {
  const PreparedGrid<float>& grid = one.grid;
  return {all(grid.scale), all(grid.inverse), all(grid.lowest), all(grid.highest)};
}
QSIM_INLINE RegisterGrid in_registers(const GridPerElement<float>& each) {
  const Grids<float>& grids = each.grids;
  return {load(grids.scale), load(grids.inverse), load(grids.lowest), load(grids.highest)};
}

// Any grid, one element at a time. RN(1 / scale) of the `reciprocal` profile was computed once.
template <Rounding rounding>
struct ByContract {
  template <class T>
  QSIM_INLINE static T quotient(T x, const PreparedGrid<T>& grid) {
    return rounding == Rounding::divide ? x / grid.scale : x * grid.inverse;
  }
  template <class T>
  QSIM_INLINE static Quantized<T> quantize(T x, const PreparedGrid<T>& grid) {
    const T exact = quotient(x, grid), steps = nearest_steps(exact, grid);
    return {dequantize(steps, grid.scale), round_half_even(exact), steps};
  }
};

// Regular grids and rounding `divide`; levels without a fused multiply-add do divide. N: float with a PreparedGrid, or
// Floats with a RegisterGrid.
struct ByThresholds {
  template <class N, class GridOfN>
  QSIM_INLINE static N quotient(N x, const GridOfN& grid) {
    if constexpr (!kFusedMultiplyAdd) return x / grid.scale;
    return exact_quotient(x, grid.scale, grid.inverse);
  }
  template <class N, class GridOfN>
  QSIM_INLINE static Quantized<N> quantize(N x, const GridOfN& grid) {
    if constexpr (kFusedMultiplyAdd) return quantize_regular(x, grid);
    const N clamped = Number<N>::clamped(x, grid.lowest, grid.highest);
    return {round_half_even(clamped / grid.scale) * grid.scale + N{}, x, clamped};
  }
};

// A register of elements and the grids from that of the first on.
template <class Rule, class GridOf>
QSIM_INLINE Quantized<Floats> quantize(Rule, Floats x, const GridOf& grids) {
  float elements[kFloats], values[kFloats], before[kFloats], after[kFloats];
  store(elements, x);
#pragma GCC unroll 1  // the vectoriser wants a loop
  for (int j = 0; j < kFloats; ++j) {
    const Quantized<float> one = Rule::quantize(elements[j], grids[j]);
    values[j] = one.value;
    before[j] = one.before_clamp;
    after[j] = one.after_clamp;
  }
  return {load(values), load(before), load(after)};
}
template <class GridOf>
QSIM_INLINE Quantized<Floats> quantize(ByThresholds, Floats x, const GridOf& grids) {
  return ByThresholds::quantize(x, in_registers(grids));
}

}  // namespace
}  // namespace qsim::cpu
