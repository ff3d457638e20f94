// Fake-quantize: every element moves to the nearest point of its integer grid (docs/numerics.md, section 1).
//
// "Steps" are integers counted from the zero point: rint(x / scale), clamped to [quant_min - zero_point,
// quant_max - zero_point]. That equals clamp(rint(x / scale) + zero_point, quant_min, quant_max) - zero_point as long
// as these numbers are exact in T: the bindings admit float32 grids within [-2^24, 2^24] and at most 2^24 wide.
#pragma once

#include <cstdint>

#include "qsim/element.h"
#include "qsim/half_even.h"
#include "qsim/layout.h"
#include "qsim/level.h"
#include "qsim/number.h"
#include "qsim/portability.h"

namespace qsim {

// divide: x / scale, as ONNX QuantizeLinear. reciprocal: x * (1 / scale), as torch core and TensorRT; differs at ties.
enum class Rounding { divide, reciprocal };

template <class T>
struct Grid {
  T scale;
  T low, high;  // the ends of the grid in steps
};

// A zero point that is learned is a float: rounded and clamped to the grid. A NaN zero point makes the scale NaN, and
// with it every result.
template <class T>
QSIM_HD Grid<T> make_grid(T scale, T zero_point, T quant_min, T quant_max) {
  const T zero = clamp_keeping_nan(round_half_even(zero_point), quant_min, quant_max);
  return {zero == zero ? scale : zero, quant_min - zero, quant_max - zero};
}

template <Rounding rounding, class T>
QSIM_HD T quotient(T x, T scale) {
  return rounding == Rounding::divide ? x / scale : x * (T(1) / scale);
}

template <class T>
QSIM_HD T nearest_steps(T quotient, Grid<T> grid) {
  return clamp_keeping_nan(round_half_even(quotient), grid.low, grid.high);
}

// Adding +0.0 turns the -0.0 of small negative x into the +0.0 that an integer 0 gives.
template <class T>
QSIM_HD T dequantize(T steps, T scale) {
  return steps * scale + T(0);
}

// Straight-through: the gradient passes where rounding stayed inside the grid. NaN is outside.
template <class T>
QSIM_HD bool in_range(T quotient, Grid<T> grid) {
  return nearest_steps(quotient, grid) == round_half_even(quotient);
}

// The term of an element in d scale: grad times the rounding error in range, times the end of the grid outside it
// (Esser et al. 2020, "Learned Step Size Quantization", eq. 3). A NaN has no say in a scale, whatever its gradient:
// both factors are 0. A NaN gradient is not hidden.
template <class T>
QSIM_HD T scale_term(T grad, T x, T quotient, Grid<T> grid) {
  const T steps = nearest_steps(quotient, grid);
  const T slope = steps == round_half_even(quotient) ? steps - quotient : steps;
  const T known_grad = x == x ? grad : T(0), known_slope = x == x ? slope : T(0);
  return known_grad * known_slope;
}

// The term of an element in d zero_point, in units of -scale.
template <class T>
QSIM_HD T zero_point_term(T grad, T x, T quotient, Grid<T> grid) {
  const T known_grad = x == x ? grad : T(0);
  return in_range(quotient, grid) ? T(0) : known_grad;
}

namespace cpu {

// Grids as arrays, one entry per parameter. If all of them are regular (exact_quotient.h), the kernels clamp x to
// `lowest` and `highest`, round exact quotients and are done. Otherwise, and in float64, these two are not read and the
// kernels follow the functors above to the letter.
template <class T>
struct Grids {
  static constexpr int kArrays = 6;
  T *scale, *inverse, *low, *high, *lowest, *highest;
  bool regular = false;
};

// The arrays from entry i on.
template <class T>
QSIM_HD Grids<T> offset(const Grids<T>& grids, std::int64_t i) {
  return {grids.scale + i,  grids.inverse + i, grids.low + i, grids.high + i,
          grids.lowest + i, grids.highest + i, grids.regular};
}

// What `lowest` and `highest` are: the first and the last x that round into the grid, which also tell what is in range,
// or just the ends of the grid, which cost less and give the same values.
enum class Bounds { of_range, of_values };

template <class T>
struct PrepareGrids {
  // Both fill the arrays of `to` and return whether all grids are regular.
  bool (*integer)(const T* scale, const std::int32_t* zero_point, std::int64_t n, T quant_min, T quant_max,
                  Bounds bounds, Grids<T> to);
  bool (*learned)(const T* scale, const T* zero_point, std::int64_t n, T quant_min, T quant_max, Bounds bounds,
                  Grids<T> to);
  // Writes `rows` times the row of n parameters with each repeated `run` times.
  void (*repeat)(Grids<T> from, std::int64_t n, std::int64_t run, std::int64_t rows, Grids<T> to);
};

// Elements [begin, end) in memory order; y may be x. With a mask, begin is a multiple of 8 and bit e % 8 of byte e / 8
// says whether element e is in range; bits past the end are 0.
template <class T>
struct FakeQuantize {
  using A = arithmetic_t<T>;
  void (*forward)(const T* x, T* y, std::int64_t begin, std::int64_t end, Grids<A> grids, const Layout& layout,
                  Rounding rounding);
  void (*with_mask)(const T* x, T* y, std::uint8_t* mask, std::int64_t begin, std::int64_t end, Grids<A> grids,
                    const Layout& layout, Rounding rounding);
};

struct FakeQuantizeKernels : PerElement<FakeQuantize> {
  PrepareGrids<float> prepare_f32;
  PrepareGrids<double> prepare_f64;
};
QSIM_LEVEL_TABLES(FakeQuantizeKernels, fake_quantize_kernels)

// zero_point is null where the zero point is not learned.
struct PartialSums {
  double *scale, *zero_point;
  QSIM_HD PartialSums from(std::int64_t first) const {
    return {scale + first, zero_point != nullptr ? zero_point + first : nullptr};
  }
};

// dx = grad where x is in range, +0.0 elsewhere.
template <class T>
using FakeQuantizeBackward = void (*)(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                                      Grids<arithmetic_t<T>> grids, const Layout& layout, Rounding rounding);

struct FakeQuantizeBackwardKernels : PerElement<FakeQuantizeBackward> {
  // dx = grad where the bit is set, +0.0 elsewhere, for elements of 2, 4 and 8 bytes; begin is a multiple of 8.
  void (*masked_16)(const std::uint16_t* grad, const std::uint8_t* mask, std::uint16_t* dx, std::int64_t begin,
                    std::int64_t end);
  void (*masked_32)(const std::uint32_t* grad, const std::uint8_t* mask, std::uint32_t* dx, std::int64_t begin,
                    std::int64_t end);
  void (*masked_64)(const std::uint64_t* grad, const std::uint8_t* mask, std::uint64_t* dx, std::int64_t begin,
                    std::int64_t end);
};
QSIM_LEVEL_TABLES(FakeQuantizeBackwardKernels, fake_quantize_backward_kernels)

// Slices [begin, end), counted over all segments in memory order: their dx, and their sums from `sums` on.
template <class T>
using FakeQuantizeLearnable = void (*)(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                                       Grids<arithmetic_t<T>> grids, const Layout& layout, Rounding rounding,
                                       Slices slices, PartialSums sums);

// Gradients of the parameters from partial sums. The n parameters were repeated as PrepareGrids::repeat did; sums of
// slices and repetitions are added in order, in float64. dzero_point is written if its sums are there.
template <class T>
using FoldSums = void (*)(PartialSums sums, Slices slices, std::int64_t n, std::int64_t width, std::int64_t run,
                          std::int64_t rows, const T* scale, double grad_factor, T* dscale, T* dzero_point);

struct FakeQuantizeLearnableKernels : PerElement<FakeQuantizeLearnable> {
  FoldSums<float> fold_f32;
  FoldSums<double> fold_f64;
};
QSIM_LEVEL_TABLES(FakeQuantizeLearnableKernels, fake_quantize_learnable_kernels)

}  // namespace cpu
}  // namespace qsim
