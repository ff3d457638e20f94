// How a row of a weight is rounded to a grid, so that its product with what the layer reads changes least.
#pragma once

#include <cstdint>

#include "qsim/half_even.h"
#include "qsim/level.h"
#include "qsim/portability.h"
#include "qsim/round_to_format.h"

namespace qsim {

// The multiples of `step` from `low` to `high`, or, where there is a format (of those that are scaled), its numbers
// times `step`; `stride` of these three is 1, or 0 where one serves for all columns.
template <class T>
struct RowGrid {
  const T *step, *low, *high;
  std::int64_t stride;
  const FormatIn<T>* format = nullptr;
};

// The number of the grid next to `wanted`, by what lies at `of`, a column times the stride.
template <bool formats, class T>
QSIM_HD T rounded(T wanted, const RowGrid<T>& grid, std::int64_t of) {
  T steps = wanted / grid.step[of];
  if constexpr (formats) {
    steps = round_to_format<false>(steps, *grid.format);
  } else {
    steps = round_half_even(steps);
    steps = steps < grid.low[of] ? grid.low[of] : steps;
    steps = steps > grid.high[of] ? grid.high[of] : steps;
  }
  return steps * grid.step[of];
}

// Column by column the best number given all others, until none changes, `rounds` times at most: Behdin et al. 2023,
// "QuantEase", algorithm 1. What a row costs is quadratic in it.
template <class T>
struct DescentRow {
  std::int64_t columns;
  T* numbers;  // of the grid; changed
  T* pull;     // half of the cost's gradient, downhill; kept up to date
  RowGrid<T> grid;
  const T *moments, *power;  // the cost's matrix, symmetric, and its diagonal

  // `stride`: the grid's.
  template <bool formats>
  QSIM_HD T best(std::int64_t column, std::int64_t stride) const {
    return rounded<formats>(numbers[column] + pull[column] / power[column], grid, column * stride);
  }
};

// From the last of `columns` columns to the first, each rounded with what those behind it handed on: Frantar et al.
// 2023, "GPTQ", algorithm 1, as Babai's nearest plane.
template <class T>
struct FeedbackRow {
  std::int64_t columns;
  const T* target;
  T* numbers;  // what the columns behind these handed on to them; then numbers of the grid
  T* errors;   // written: what is left of the target
  RowGrid<T> grid;
  const T* factor;      // the lower Cholesky factor of the cost's matrix, on its diagonal
  std::int64_t stride;  // from a row of it to the next

  template <bool formats>
  QSIM_HD T number(std::int64_t column) const {
    const T own = factor[column * stride + column];
    return rounded<formats>(target[column] + numbers[column] / own, grid, column * grid.stride);
  }
};

namespace cpu {

struct WeightRowKernels {
  void (*descend_f32)(const DescentRow<float>& row, std::int64_t rounds);
  void (*descend_f64)(const DescentRow<double>& row, std::int64_t rounds);
  void (*feed_back_f32)(const FeedbackRow<float>& row);
  void (*feed_back_f64)(const FeedbackRow<double>& row);
};
QSIM_LEVEL_TABLES(WeightRowKernels, weight_row_kernels)

}  // namespace cpu
}  // namespace qsim
