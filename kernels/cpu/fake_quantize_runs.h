// Walks a range of elements as runs that the vector loops take whole. A table of parameters is whatever has one() and
// from(): Grids, or another kernel's own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "loops.h"
#include "qsim/fake_quantize.h"

namespace qsim::cpu {
namespace {

// What the arrays of Grids say about one parameter.
template <class T>
struct Entry : Grid<T> {
  T inverse, lowest, highest;
};

template <class T>
QSIM_HD Entry<T> entry(const Grids<T>& grids, std::int64_t i) {
  return {{grids.scale[i], grids.low[i], grids.high[i]}, grids.inverse[i], grids.lowest[i], grids.highest[i]};
}

// Grids for the elements of a run: one for all, or one each.
template <class T>
struct OneGrid {
  static constexpr bool kShared = true;  // neighbours share it
  Entry<T> grid;
  QSIM_HD Entry<T> operator[](std::int64_t) const { return grid; }
  QSIM_HD OneGrid after(std::int64_t) const { return *this; }
};

template <class T>
struct GridPerElement {
  static constexpr bool kShared = false;
  Grids<T> grids;
  QSIM_HD Entry<T> operator[](std::int64_t i) const { return entry(grids, i); }
  QSIM_HD GridPerElement after(std::int64_t n) const { return {offset(grids, n)}; }
};

// For `size` elements each.
template <int size>
struct GridPerBlock {
  static constexpr bool kShared = true;
  Grids<float> grids;
  QSIM_HD OneGrid<float> after(int n) const { return {entry(grids, n / size)}; }
};

template <class T>
QSIM_HD OneGrid<T> one(const Grids<T>& grids, std::int64_t parameter) {
  return {entry(grids, parameter)};
}

template <class T>
QSIM_HD GridPerElement<T> from(const Grids<T>& grids, std::int64_t parameter) {
  return {offset(grids, parameter)};
}

// Elements up to `end` as runs of `length` elements whose grids follow each other and begin anew every `period` runs.
// Of layouts that are nothing of the kind the length is 1.
struct EqualRuns {
  std::int64_t length, period;
};
QSIM_HD EqualRuns equal_runs(const Layout& layout, std::int64_t end) {
  if (layout.width == 1 && layout.outer % layout.segment == 0) return {layout.segment, INT64_MAX};
  if (layout.segment == layout.outer && end <= layout.outer) return {layout.run, layout.width};
  return {1, 1};
}

// Elements [begin, end) lie within the segment that starts at `start` and owns the parameters from `parameter` on.
// Calls run(first element, elements, OneGrid, parameter - first of the segment).
template <class Table, class Run>
QSIM_HD void runs_of_one(const Layout& layout, const Table& grids, std::int64_t start, std::int64_t parameter,
                         std::int64_t begin, std::int64_t end, Run run) {
  if (layout.width == 1) return run(begin, end - begin, one(grids, parameter), 0);
  std::int64_t column = (begin - start) / layout.run % layout.width;
  std::int64_t stop = begin - (begin - start) % layout.run + layout.run;
  while (begin < end) {
    stop = std::min(stop, end);
    run(begin, stop - begin, one(grids, parameter + column), column);
    begin = stop;
    stop += layout.run;
    column = column + 1 == layout.width ? 0 : column + 1;
  }
}

// Calls run(first element, elements, GridPerElement) row by row.
template <class Table, class Run>
QSIM_HD void runs_of_rows(const Layout& layout, const Table& grids, std::int64_t start, std::int64_t parameter,
                          std::int64_t begin, std::int64_t end, Run run) {
  for (std::int64_t column = (begin - start) % layout.width; begin < end; column = 0) {
    const std::int64_t n = std::min(layout.width - column, end - begin);
    run(begin, n, from(grids, parameter + column), column);
    begin += n;
  }
}

// Calls run(first element, elements, grids) for the runs of [begin, end) that share one grid each, and rows(first
// element, elements, start of the segment, parameter at its start) for the parts of segments with a grid per element.
template <class Table, class Run, class Rows>
QSIM_HD void for_each_run(const Layout& layout, const Table& grids, std::int64_t begin, std::int64_t end, Run run,
                          Rows rows) {
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
      runs_of_one(layout, grids, start, parameter, begin, begin + n,
                  [&](std::int64_t at, std::int64_t count, auto grid, std::int64_t)
                      __attribute__((always_inline)) { run(at, count, grid); });
    }
    begin = start = stop;
    parameter += layout.width;
    if (stop == outer_end) outer_end += layout.outer;
  }
}

// Calls run(first element, elements, grids) for all runs of [begin, end), cut into pieces of at most `longest`
// elements.
template <class Table, class Run>
QSIM_HD void for_each_run(const Layout& layout, const Table& grids, std::int64_t begin, std::int64_t end,
                          std::int64_t longest, Run run) {
  const auto pieces = [&](std::int64_t at, std::int64_t n, auto grid) {
    for (; n > longest; n -= longest, at += longest, grid = grid.after(longest)) run(at, longest, grid);
    run(at, n, grid);
  };
  for_each_run(layout, grids, begin, end, pieces,
               [&](std::int64_t at, std::int64_t n, std::int64_t start, std::int64_t parameter) {
                 runs_of_rows(layout, grids, start, parameter, at, at + n,
                              [&](std::int64_t first, std::int64_t count, auto grid, std::int64_t) {
                                pieces(first, count, grid);
                              });
               });
}

}  // namespace
}  // namespace qsim::cpu
