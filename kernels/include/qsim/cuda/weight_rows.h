// CUDA entry points for rows of weights that are rounded to grids: device pointers, stream-ordered, no synchronisation,
// no allocation, capturable.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "qsim/weight_rows.h"

namespace qsim::cuda {

// `rows` rows of `columns` numbers one after the other, `in_group` of them with one matrix of columns * columns; what a
// grid has for a row follows what it has for the row before: one of each, or `columns`, as its stride says.
struct WeightRows {
  unsigned rows, in_group;
  std::int64_t columns;  // fewer than 2^31
};

// `of`: what it says of the first row. `power`: the diagonals of the matrices, [groups, columns].
template <class T>
cudaError_t descend(WeightRows shape, const DescentRow<T>& of, std::int64_t rounds, cudaStream_t stream);

// The columns from `begin` on, of.columns of them; `of` points to the first column that there is of the first row, and
// to errors that have rows of of.columns.
template <class T>
cudaError_t feed_back(WeightRows shape, const FeedbackRow<T>& of, std::int64_t begin, cudaStream_t stream);

}  // namespace qsim::cuda
