// Coordinate descent on how a row of a weight is rounded: Behdin et al. 2023, "QuantEase", algorithm 1.
#pragma once

#include <cstdint>

#include "qsim/level.h"

namespace qsim::cpu {

// A row of a weight on its grid, the multiples of `step` from `low` to `high`. What it costs is quadratic in the row.
template <class T>
struct DescentRow {
  std::int64_t columns;
  T* numbers;  // of the grid; changed
  T* pull;     // half of the cost's gradient, downhill; kept up to date
  const T *step, *low, *high;
  std::int64_t stride;       // of these three: 1, or 0 where one serves for all columns
  const T *moments, *power;  // the cost's matrix, symmetric, and its diagonal
};

struct DescentKernels {
  // Column by column the best number given all others, until none changes, `rounds` times at most.
  void (*f32)(const DescentRow<float>& row, std::int64_t rounds);
  void (*f64)(const DescentRow<double>& row, std::int64_t rounds);
};
QSIM_LEVEL_TABLES(DescentKernels, descent_kernels)

}  // namespace qsim::cpu
