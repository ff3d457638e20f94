// Walks a range of elements as runs that a vector loop takes whole: neighbours that share one parameter, or have one
// each. Used by all kernels whose elements have a grid or a scale.
//
// What is handed to the loops comes from a table of parameters, which is whatever has
//   shared(parameter)         the one of all elements of a run
//   per_element(parameter)    one each, from the first element's on
#pragma once

#include <algorithm>
#include <cstdint>

#include "qsim/layout.h"
#include "vector/registers.h"

namespace qsim::cpu {
namespace {

// Elements up to `end` as runs of `length` elements whose parameters follow each other and begin anew every `period`
// runs. Of layouts that are nothing of the kind the length is 1.
struct EqualRuns {
  std::int64_t length, period;
};
QSIM_INLINE EqualRuns equal_runs(const Layout& layout, std::int64_t end) {
  if (layout.width == 1 && layout.outer % layout.segment == 0) return {layout.segment, INT64_MAX};
  if (layout.segment == layout.outer && end <= layout.outer) return {layout.run, layout.width};
  return {1, 1};
}

// Elements [begin, end) lie within the segment that starts at `start` and owns the parameters from `parameter` on.
// Calls run(first element, elements, what they share, parameter - first of the segment).
template <class Table, class Run>
QSIM_INLINE void for_each_shared_run(const Layout& layout, const Table& table, std::int64_t start,
                                     std::int64_t parameter, std::int64_t begin, std::int64_t end, Run run) {
  if (layout.width == 1) return run(begin, end - begin, table.shared(parameter), 0);
  std::int64_t column = (begin - start) / layout.run % layout.width;
  std::int64_t stop = begin - (begin - start) % layout.run + layout.run;
  while (begin < end) {
    stop = std::min(stop, end);
    run(begin, stop - begin, table.shared(parameter + column), column);
    begin = stop;
    stop += layout.run;
    column = column + 1 == layout.width ? 0 : column + 1;
  }
}

// Calls run(first element, elements, what they share) for the runs of [begin, end), and rows(first element, elements,
// start of the segment, parameter at its start) for the parts of segments with a parameter per element.
template <class Table, class Run, class Rows>
QSIM_INLINE void for_each_run_or_rows(const Layout& layout, const Table& table, std::int64_t begin, std::int64_t end,
                                      Run run, Rows rows) {
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment;
  const std::int64_t outer = begin / layout.outer, segment = begin % layout.outer / layout.segment;
  std::int64_t outer_end = (outer + 1) * layout.outer;
  std::int64_t start = outer * layout.outer + segment * layout.segment;
  std::int64_t parameter = (outer * segments + segment) * layout.width;
  while (begin < end) {
    const std::int64_t stop = std::min(start + layout.segment, outer_end), n = std::min(stop, end) - begin;
    if (layout.run == 1 && layout.width > 1) {
      rows(begin, n, start, parameter);
    } else {
      for_each_shared_run(layout, table, start, parameter, begin, begin + n,
                          [&](std::int64_t at, std::int64_t count, auto shared, std::int64_t)
                              QSIM_INLINE_LAMBDA { run(at, count, shared); });
    }
    begin = start = stop;
    parameter += layout.width;
    if (stop == outer_end) outer_end += layout.outer;
  }
}

// Calls run(first element, elements, parameters) for all runs of [begin, end), a row with a parameter per element being
// one too, cut into pieces of at most `longest` elements.
template <class Table, class Run>
QSIM_INLINE void for_each_run(const Layout& layout, const Table& table, std::int64_t begin, std::int64_t end,
                              std::int64_t longest, Run run) {
  const auto pieces = [&](std::int64_t at, std::int64_t n, auto parameters) {
    for (; n > longest; n -= longest, at += longest, parameters = parameters.after(longest)) {
      run(at, longest, parameters);
    }
    run(at, n, parameters);
  };
  for_each_run_or_rows(layout, table, begin, end, pieces,
                       [&](std::int64_t at, std::int64_t n, std::int64_t start, std::int64_t parameter) {
                         const std::int64_t stop = at + n;
                         for (std::int64_t column = (at - start) % layout.width; at < stop; column = 0) {
                           const std::int64_t count = std::min(layout.width - column, stop - at);
                           pieces(at, count, table.per_element(parameter + column));
                           at += count;
                         }
                       });
}

}  // namespace
}  // namespace qsim::cpu
