// Coordinate descent on rounding. The bindings call it through descent_kernels(): rows of a weight on any thread.
#include "qsim/descent.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vector/registers.h"

namespace qsim::cpu {

namespace {

// Columns whose best numbers are found together: after GPTQ few change, and a change is rare in so many.
constexpr int kStretch = 64;

// The best numbers for the columns from `begin` on, given all others, each by itself. Whether any is another one.
template <std::int64_t stride, class T>
QSIM_INLINE bool best_numbers(const DescentRow<T>& row, std::int64_t begin, int n, T* best) {
  using Flag = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  Flag differs = 0;
  for (int i = 0; i < n; ++i) {
    const std::int64_t at = begin + i, of = at * stride;
    const T wanted = row.numbers[at] + row.pull[at] / row.power[at];
    T steps = std::rint(wanted / row.step[of]);
    steps = steps < row.low[of] ? row.low[of] : steps;
    steps = steps > row.high[of] ? row.high[of] : steps;
    best[i] = steps * row.step[of];
    differs |= best[i] != row.numbers[at] ? Flag{-1} : Flag{0};
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
template <std::int64_t stride, class T>
bool descend_once(const DescentRow<T>& row) {
  bool moved = false;
  T best[kStretch];
  for (std::int64_t begin = 0; begin < row.columns; begin += kStretch) {
    const int n = static_cast<int>(std::min<std::int64_t>(kStretch, row.columns - begin));
    int first = 0;
    while (n == kStretch ? best_numbers<stride>(row, begin, kStretch, best)
                         : best_numbers<stride>(row, begin, n, best)) {
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
  for (std::int64_t i = 0; i < rounds; ++i) {
    if (!(row.stride == 0 ? descend_once<0>(row) : descend_once<1>(row))) return;
  }
}

}  // namespace

namespace QSIM_LEVEL {
const DescentKernels descent_kernels = {descend<float>, descend<double>};
}

}  // namespace qsim::cpu
