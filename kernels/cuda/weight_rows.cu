// Error feedback and coordinate descent on rounding, a warp to a row: columns depend on each other, what a column
// hands on to all others is added by lanes. To the bits of the CPU, whose order of additions this is.
#include "qsim/cuda/weight_rows.h"

#include "launch.cuh"
#include "reduce.cuh"

namespace qsim::cuda {

namespace {

// Of the grid of the first row, that of another from the column `begin` on.
template <class T>
__device__ RowGrid<T> grid_of(const RowGrid<T>& first, std::int64_t row, std::int64_t columns, std::int64_t begin,
                              const FormatIn<T>* format) {
  const std::int64_t of = first.stride == 0 ? row : row * columns + begin;
  return {first.step + of, first.low + of, first.high + of, first.stride, format};
}

// f(row) for the rows of a warp.
template <class F>
__device__ void for_each_row(unsigned rows, F f) {
  for (unsigned row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows; row += gridDim.x * kWarps) f(row);
}

// One round. Whether a column changed.
template <class T, bool formats>
__device__ bool descend_once(const DescentRow<T>& row, int lane) {
  const int columns = static_cast<int>(row.columns);
  bool moved = false;
  for (int begin = 0; begin < columns; begin += 32) {
    const int own = begin + lane < columns ? begin + lane : columns - 1;
    unsigned open = columns - begin < 32 ? (1u << (columns - begin)) - 1 : ~0u;  // lanes whose turn is to come
    while (true) {
      const T number = row.template best<formats>(own, row.grid.stride), was = row.numbers[own];
      const unsigned found = __ballot_sync(kWholeWarp, number != was) & open;
      if (found == 0) break;
      const int winner = __ffs(static_cast<int>(found)) - 1;
      const T change = __shfl_sync(kWholeWarp, number - was, winner);
      if (lane == winner) row.numbers[own] = number;
      const T* const moments = row.moments + (begin + winner) * row.columns;
      for (int i = lane; i < columns; i += 32) row.pull[i] -= change * moments[i];  // read by this lane
      open = ~1u << winner & open;
      moved = true;
    }
  }
  return moved;
}

template <class T, bool formats>
__global__ void __launch_bounds__(kThreads, 4)  // as many registers as it takes: at 40 some are spilled
    descend_rows(WeightRows shape, const __grid_constant__ DescentRow<T> of, std::int64_t rounds,
                 const __grid_constant__ FormatIn<T> format) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for_each_row(shape.rows, [&](unsigned i) {
    const std::int64_t group = i / shape.in_group, at = i * shape.columns;
    const DescentRow<T> row{shape.columns,
                            of.numbers + at,
                            of.pull + at,
                            grid_of(of.grid, i, shape.columns, 0, &format),
                            of.moments + group * shape.columns * shape.columns,
                            of.power + group * shape.columns};
    for (std::int64_t round = 0; round < rounds && descend_once<T, formats>(row, lane); ++round) {
    }
  });
}

template <class T, bool formats>
__global__ void __launch_bounds__(kThreads)
    feed_back_rows(WeightRows shape, const __grid_constant__ FeedbackRow<T> of, std::int64_t begin,
                   const __grid_constant__ FormatIn<T> format) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for_each_row(shape.rows, [&](unsigned i) {
    const std::int64_t at = i * shape.columns + begin;
    const FeedbackRow<T> row{of.columns,
                             of.target + at,
                             of.numbers + at,
                             of.errors + i * of.columns,
                             grid_of(of.grid, i, shape.columns, begin, &format),
                             of.factor + (i / shape.in_group * shape.columns + begin) * shape.columns + begin,
                             shape.columns};
    for (std::int64_t column = row.columns - 1; column >= 0; --column) {
      const T number = row.template number<formats>(column), error = row.target[column] - number;
      __syncwarp();  // all lanes have read what was handed on to this column
      if (lane == 0) {
        row.numbers[column] = number;
        row.errors[column] = error;
      }
      const T* const factor = row.factor + column * row.stride;
      for (std::int64_t j = lane; j < column; j += 32) row.numbers[j] += error * factor[j];
      __syncwarp();
    }
  });
}

// A kernel on the grids that `of` has: of a float format, or of integers.
template <class T, class Row>
using RowsKernel = void (*)(WeightRows, Row, std::int64_t, FormatIn<T>);

template <class T, class Row>
cudaError_t launch_rows(RowsKernel<T, Row> on_format, RowsKernel<T, Row> on_integers, WeightRows shape, const Row& of,
                        std::int64_t count, cudaStream_t stream) {
  if (shape.rows == 0 || of.columns == 0) return cudaSuccess;
  const FormatIn<T>* const format = of.grid.format;
  return launch(format != nullptr ? on_format : on_integers, {blocks_for(shape.rows, kWarps), kThreads}, stream, shape,
                of, count, format != nullptr ? *format : FormatIn<T>{});
}

}  // namespace

template <class T>
cudaError_t descend(WeightRows shape, const DescentRow<T>& of, std::int64_t rounds, cudaStream_t stream) {
  return launch_rows<T, DescentRow<T>>(descend_rows<T, true>, descend_rows<T, false>, shape, of, rounds, stream);
}

template <class T>
cudaError_t feed_back(WeightRows shape, const FeedbackRow<T>& of, std::int64_t begin, cudaStream_t stream) {
  return launch_rows<T, FeedbackRow<T>>(feed_back_rows<T, true>, feed_back_rows<T, false>, shape, of, begin, stream);
}

template cudaError_t descend(WeightRows, const DescentRow<float>&, std::int64_t, cudaStream_t);
template cudaError_t descend(WeightRows, const DescentRow<double>&, std::int64_t, cudaStream_t);
template cudaError_t feed_back(WeightRows, const FeedbackRow<float>&, std::int64_t, cudaStream_t);
template cudaError_t feed_back(WeightRows, const FeedbackRow<double>&, std::int64_t, cudaStream_t);

}  // namespace qsim::cuda
