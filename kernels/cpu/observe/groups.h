// Groups of neighbours with the scale that their own range gives. The loops of dynamic quantization are made of these.
#pragma once

#include <algorithm>

#include "observe/finite_range.h"
#include "qsim/dynamic.h"

namespace qsim::cpu {
namespace {

// Calls run(first element, elements, scale and zero point) for the groups of rows [begin, end).
template <class T, class Run>
QSIM_INLINE void for_each_group(const T* x, std::int64_t begin, std::int64_t end, GroupedRows rows,
                                const GroupRule& rule, Run run) {
  NonFinite left_out;
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t at = 0; at < rows.length; at += rows.group) {
      const std::int64_t first = row * rows.length + at, n = std::min(rows.group, rows.length - at);
      FiniteRange range;
      observe_run(x + first, n, range, left_out);
      run(first, n, params_of_group(range, rule));
    }
  }
}

}  // namespace
}  // namespace qsim::cpu
