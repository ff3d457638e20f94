// Error feedback and coordinate descent on rounding. The bindings call them through weight_row_kernels(): rows of a
// weight on any thread.
#include "qsim/weight_rows.h"

#include <algorithm>
#include <type_traits>

#include "vector/registers.h"

namespace qsim::cpu {

namespace {

// Columns whose best numbers are found together: after GPTQ few change, and a change is rare in so many.
constexpr int kStretch = 64;

// The best numbers for the columns from `begin` on, given all others, each by itself. Whether any is another one.
template <bool formats, std::int64_t stride, class T>
QSIM_INLINE bool best_numbers(const DescentRow<T>& row, std::int64_t begin, int n, T* best) {
  using Flag = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  Flag differs = 0;
  for (int i = 0; i < n; ++i) {
    best[i] = row.template best<formats>(begin + i, stride);
    differs |= best[i] != row.numbers[begin + i] ? Flag{-1} : Flag{0};
  }
  return differs != 0;
}

template <class T>
QSIM_INLINE void move(const DescentRow<T>& row, std::int64_t column, T number) {
  const T change = number - row.numbers[column];
  const T* const moments = row.moments + column * row.columns;
  row.numbers[column] = number;
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < row.columns; ++i) row.pull[i] -= change * moments[i];
}

// One round. Whether a column changed.
template <bool formats, std::int64_t stride, class T>
bool descend_once(const DescentRow<T>& row) {
  bool moved = false;
  T best[kStretch];
  for (std::int64_t begin = 0; begin < row.columns; begin += kStretch) {
    const int n = static_cast<int>(std::min<std::int64_t>(kStretch, row.columns - begin));
    int first = 0;
    while (n == kStretch ? best_numbers<formats, stride>(row, begin, kStretch, best)
                         : best_numbers<formats, stride>(row, begin, n, best)) {
      while (first < n && best[first] == row.numbers[begin + first]) ++first;
      if (first == n) break;
      move(row, begin + first, best[first]);
      moved = true;
      ++first;
    }
  }
  return moved;
}

template <class T>
void descend(const DescentRow<T>& row, std::int64_t rounds) {
  const auto once = row.grid.format != nullptr
                        ? (row.grid.stride == 0 ? descend_once<true, 0, T> : descend_once<true, 1, T>)
                        : (row.grid.stride == 0 ? descend_once<false, 0, T> : descend_once<false, 1, T>);
  for (std::int64_t i = 0; i < rounds && once(row); ++i) {
  }
}

template <bool formats, class T>
void feed_back_once(const FeedbackRow<T>& row) {
  for (std::int64_t i = row.columns - 1; i >= 0; --i) {
    const T* const factor = row.factor + i * row.stride;
    const T number = row.template number<formats>(i), error = row.target[i] - number;
    row.numbers[i] = number;
    row.errors[i] = error;
    QSIM_INDEPENDENT
    for (std::int64_t j = 0; j < i; ++j) row.numbers[j] += error * factor[j];
  }
}

template <class T>
void feed_back(const FeedbackRow<T>& row) {
  row.grid.format != nullptr ? feed_back_once<true>(row) : feed_back_once<false>(row);
}

}  // namespace

namespace QSIM_LEVEL {
const WeightRowKernels weight_row_kernels = {descend<float>, descend<double>, feed_back<float>, feed_back<double>};
}

}  // namespace qsim::cpu
