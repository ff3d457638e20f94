// How a row of a weight is rounded to a grid, so that its product with what the layer reads changes least.
#pragma once

#include <cstdint>

#include "qsim/level.h"

namespace qsim::cpu {

// The multiples of `step` from `low` to `high`; `stride` of these three is 1, or 0 where one serves for all columns.
template <class T>
struct RowGrid {
  const T *step, *low, *high;
  std::int64_t stride;
};

// A row of a weight on its grid. What it costs is quadratic in the row.
template <class T>
struct DescentRow {
  std::int64_t columns;
  T* numbers;  // of the grid; changed
  T* pull;     // half of the cost's gradient, downhill; kept up to date
  RowGrid<T> grid;
  const T *moments, *power;  // the cost's matrix, symmetric, and its diagonal
};

// The columns of a row that hand on their errors to each other: `columns` of them, from where these pointers point.
template <class T>
struct FeedbackRow {
  std::int64_t columns;
  const T* target;
  T* numbers;  // what the columns behind these handed on to them; then numbers of the grid
  T* errors;   // written: what is left of the target
  RowGrid<T> grid;
  const T* factor;      // the lower Cholesky factor of the cost's matrix, on its diagonal
  std::int64_t stride;  // from a row of it to the next
};

struct WeightRowKernels {
  // Column by column the best number given all others, until none changes, `rounds` times at most: Behdin et al. 2023,
  // "QuantEase", algorithm 1.
  void (*descend_f32)(const DescentRow<float>& row, std::int64_t rounds);
  void (*descend_f64)(const DescentRow<double>& row, std::int64_t rounds);
  // From the last column to the first, each rounded with what those behind it handed on: Frantar et al. 2023, "GPTQ",
  // algorithm 1, as Babai's nearest plane.
  void (*feed_back_f32)(const FeedbackRow<float>& row);
  void (*feed_back_f64)(const FeedbackRow<double>& row);
};
QSIM_LEVEL_TABLES(WeightRowKernels, weight_row_kernels)

}  // namespace qsim::cpu
