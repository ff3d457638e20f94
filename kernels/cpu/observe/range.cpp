// The finite range of a tensor, of channels, of columns. The bindings call it through observe_range_kernels(), on any
// thread, and merge what threads found.
#include "observe/finite_range.h"

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

// A tile is read in runs of 2 KB or more at every level; its last register may overlap the one before.
constexpr std::int64_t kTileRows = 16, kTileColumns = 8 * kChained;

struct Columns {
  float lowest[kTileColumns + kFloats], highest[kTileColumns + kFloats];
};

template <int chains>
QSIM_INLINE Extremes<chains> load_extremes(const Columns& columns, std::int64_t column) {
  Extremes<chains> extremes;
  for (int j = 0; j < chains; ++j) {
    extremes.lowest[j] = load(columns.lowest + column + j * kFloats);
    extremes.highest[j] = load(columns.highest + column + j * kFloats);
  }
  return extremes;
}

// Extends `chains` registers of columns by some rows; the first `skip` columns were read before.
template <int chains, class T>
QSIM_INLINE void extend_columns(const T* x, std::int64_t rows, std::int64_t stride, std::int64_t column, int skip,
                                Columns& columns, NonFinite& counts) {
  Extremes<chains> next = load_extremes<chains>(columns, column);
  Sums<chains> sums;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int j = 0; j < chains; ++j) extend(next, sums, j, load(x + row * stride + column + j * kFloats));
  }
  if (!finite(next, sums)) [[unlikely]] {
    next = load_extremes<chains>(columns, column);
    NonFiniteLanes found;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int j = 0; j < chains; ++j) {
        extend_finite(next, found, j, load(x + row * stride + column + j * kFloats), skip);
      }
    }
    found.add_to(counts);
  }
  for (int j = 0; j < chains; ++j) {
    store(columns.lowest + column + j * kFloats, next.lowest[j]);
    store(columns.highest + column + j * kFloats, next.highest[j]);
  }
}

// `width` >= kFloats columns of rows `stride` apart.
template <class T>
QSIM_INLINE void observe_tile(const T* x, std::int64_t rows, std::int64_t stride, std::int64_t width, Columns& columns,
                              NonFinite& counts) {
  for (std::int64_t i = 0; i < width; ++i) columns.lowest[i] = FLT_MAX, columns.highest[i] = -FLT_MAX;
  for (std::int64_t row = 0; row < rows; row += kTileRows) {
    const std::int64_t count = rows - row < kTileRows ? rows - row : kTileRows;
    const T* tile = x + row * stride;
    std::int64_t column = 0;
    for (; column + kChained <= width; column += kChained) {
      extend_columns<kChains>(tile, count, stride, column, 0, columns, counts);
    }
    for (; column < width; column += kFloats) {
      const std::int64_t at = column + kFloats <= width ? column : width - kFloats;
      extend_columns<1>(tile, count, stride, at, static_cast<int>(column - at), columns, counts);
    }
  }
}

// Joins columns to ranges of their own; `width` >= kFloats.
QSIM_INLINE void join_each(const Columns& columns, std::int64_t width, float* lowest, float* highest) {
  for (std::int64_t i = 0; i < width; i += kFloats) {
    const std::int64_t at = i + kFloats <= width ? i : width - kFloats;
    const Floats low = load(columns.lowest + at), high = load(columns.highest + at);
    const Ints seen = low <= high;
    store(lowest + at, minimum(seen ? low : all(INFINITY), load(lowest + at)) + 0.f);
    store(highest + at, maximum(seen ? high : all(-INFINITY), load(highest + at)) + 0.f);
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
// matrices are read `together` rows at a time. outer >= kFloats.
template <class T>
void observe_columns(const T* x, std::int64_t outer, std::int64_t ranges, std::int64_t inner, float* lowest,
                     float* highest, NonFinite& counts) {
  const std::int64_t period = ranges * inner;
  std::int64_t together = period < kChained ? 4 * kChained / period : 1;
  if (together > outer) together = outer;
  const std::int64_t stride = period * together, rows = outer / together;
  for (std::int64_t begin = 0; begin < stride;) {
    const std::int64_t rest = stride - begin, width = rest < kTileColumns + kFloats ? rest : kTileColumns;
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
  } else if (inner < kShortRow && outer >= kFloats) {
    observe_columns(elements, outer, ranges, inner, lowest, highest, counts);
  } else {
    observe_rows(elements, outer * ranges, ranges, inner, lowest, highest, counts);
  }
}

}  // namespace

namespace QSIM_LEVEL {
const ObserveRangeKernels observe_range_kernels = {by_element<ObserveRange>([]<class T>() { return run<T>; })};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
