#include "qsim/finite_range.h"

#include "finite_lanes.h"

namespace qsim::cpu {

namespace {

// Rows of `inner` elements: row r extends range r % ranges.
template <class T>
void observe_rows(const T* x, std::int64_t rows, std::int64_t ranges, std::int64_t inner, float* lowest, float* highest,
                  NonFinite& counts) {
  for (std::int64_t row = 0, r = 0; row < rows; ++row, r = r + 1 == ranges ? 0 : r + 1) {
    FiniteRange range{lowest[r], highest[r]};
    observe_run(x + row * inner, inner, range, counts);
    lowest[r] = range.lowest;
    highest[r] = range.highest;
  }
}

// A tile is read in runs of 2 KB or more at every level; its last vector may overlap the one before.
constexpr std::int64_t kTileRows = 16, kTileColumns = 8 * kStep;

struct Columns {
  float lowest[kTileColumns + kWidth], highest[kTileColumns + kWidth];
};

template <int chains>
QSIM_INLINE Lanes<chains> load_lanes(const Columns& columns, std::int64_t column) {
  Lanes<chains> lanes;
  for (int j = 0; j < chains; ++j) {
    lanes.lowest[j] = load(columns.lowest + column + j * kWidth);
    lanes.highest[j] = load(columns.highest + column + j * kWidth);
  }
  return lanes;
}

// Extends `chains` vectors of columns by some rows; the first `skip` columns were read before.
template <int chains, class T>
QSIM_INLINE void extend_columns(const T* x, std::int64_t rows, std::int64_t stride, std::int64_t column, int skip,
                                Columns& columns, NonFinite& counts) {
  Lanes<chains> next = load_lanes<chains>(columns, column);
  Sums<chains> sums;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int j = 0; j < chains; ++j) extend(next, sums, j, load(x + row * stride + column + j * kWidth));
  }
  if (!finite(next, sums)) [[unlikely]] {
    next = load_lanes<chains>(columns, column);
    LaneCounts found;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int j = 0; j < chains; ++j) {
        extend_finite(next, found, j, load(x + row * stride + column + j * kWidth), skip);
      }
    }
    found.add_to(counts);
  }
  for (int j = 0; j < chains; ++j) {
    store(columns.lowest + column + j * kWidth, next.lowest[j]);
    store(columns.highest + column + j * kWidth, next.highest[j]);
  }
}

// `width` >= kWidth columns of rows `stride` apart.
template <class T>
QSIM_INLINE void observe_tile(const T* x, std::int64_t rows, std::int64_t stride, std::int64_t width, Columns& columns,
                              NonFinite& counts) {
  for (std::int64_t i = 0; i < width; ++i) columns.lowest[i] = FLT_MAX, columns.highest[i] = -FLT_MAX;
  for (std::int64_t row = 0; row < rows; row += kTileRows) {
    const std::int64_t count = rows - row < kTileRows ? rows - row : kTileRows;
    const T* tile = x + row * stride;
    std::int64_t column = 0;
    for (; column + kStep <= width; column += kStep) {
      extend_columns<kChains>(tile, count, stride, column, 0, columns, counts);
    }
    for (; column < width; column += kWidth) {
      const std::int64_t at = column + kWidth <= width ? column : width - kWidth;
      extend_columns<1>(tile, count, stride, at, static_cast<int>(column - at), columns, counts);
    }
  }
}

// Joins columns to ranges of their own; `width` >= kWidth.
QSIM_INLINE void join_each(const Columns& columns, std::int64_t width, float* lowest, float* highest) {
  for (std::int64_t i = 0; i < width; i += kWidth) {
    const std::int64_t at = i + kWidth <= width ? i : width - kWidth;
    const Floats low = load(columns.lowest + at), high = load(columns.highest + at);
    const Ints seen = low <= high;
    store(lowest + at, smaller(seen ? low : all(INFINITY), load(lowest + at)) + 0.f);
    store(highest + at, larger(seen ? high : all(-INFINITY), load(highest + at)) + 0.f);
  }
}

// Joins columns to ranges: `inner` neighbours share one, and the ranges recur. `first` is the place of the first
// column.
QSIM_INLINE void join(const Columns& columns, std::int64_t width, std::int64_t first, std::int64_t ranges,
                      std::int64_t inner, float* lowest, float* highest) {
  std::int64_t r = first / inner % ranges, i = first % inner;
  for (std::int64_t column = 0; column < width; ++column) {
    if (columns.lowest[column] <= columns.highest[column]) {
      FiniteRange range{lowest[r], highest[r]};
      range.merge({columns.lowest[column], columns.highest[column]});
      lowest[r] = range.lowest;
      highest[r] = range.highest;
    }
    if (++i == inner) i = 0, r = r + 1 == ranges ? 0 : r + 1;
  }
}

// Short `inner`: every column of the matrix [outer, ranges * inner] has a range of its own until the end. Narrow
// matrices are read `together` rows at a time. outer >= kWidth.
template <class T>
void observe_columns(const T* x, std::int64_t outer, std::int64_t ranges, std::int64_t inner, float* lowest,
                     float* highest, NonFinite& counts) {
  const std::int64_t period = ranges * inner;
  std::int64_t together = period < kStep ? 4 * kStep / period : 1;
  if (together > outer) together = outer;
  const std::int64_t stride = period * together, rows = outer / together;
  for (std::int64_t begin = 0; begin < stride;) {
    const std::int64_t rest = stride - begin, width = rest < kTileColumns + kWidth ? rest : kTileColumns;
    Columns columns;
    observe_tile(x + begin, rows, stride, width, columns, counts);
    if (inner == 1 && together == 1) {
      join_each(columns, width, lowest + begin, highest + begin);
    } else {
      join(columns, width, begin, ranges, inner, lowest, highest);
    }
    begin += width;
  }
  const std::int64_t done = rows * together;
  observe_rows(x + done * period, (outer - done) * ranges, ranges, inner, lowest, highest, counts);
}

constexpr std::int64_t kShortRow = 128;  // shorter ones cost more to fold than to read

template <class T>
void run(const void* x, std::int64_t outer, std::int64_t ranges, std::int64_t inner, float* lowest, float* highest,
         NonFinite& counts) {
  const T* elements = static_cast<const T*>(x);
  if (ranges == 1) {
    observe_rows(elements, 1, 1, outer * inner, lowest, highest, counts);
  } else if (inner < kShortRow && outer >= kWidth) {
    observe_columns(elements, outer, ranges, inner, lowest, highest, counts);
  } else {
    observe_rows(elements, outer * ranges, ranges, inner, lowest, highest, counts);
  }
}

}  // namespace

namespace QSIM_LEVEL {
const ObserveRangeKernels observe_range_kernels = {{run<float>, run<Float16>, run<BFloat16>, run<double>}};
}

}  // namespace qsim::cpu
