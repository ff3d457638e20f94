#include <algorithm>
#include <type_traits>

#include "fake_quantize_lanes.h"
#include "fake_quantize_rules.h"
#include "qsim/fake_quantize.h"
#include "underflow.h"

namespace qsim::cpu {

namespace {

// Terms that a lane adds in the arithmetic type before float64 takes over.
constexpr std::int64_t kTerms = 64;

// An element on its grid; in range where `before` equals `after`.
template <class A>
struct Placed {
  A quotient, steps, before, after;
};

template <Rounding rounding, class A>
QSIM_HD Placed<A> place(ByContract<rounding>, A x, const Entry<A>& grid) {
  const A quotient = ByContract<rounding>::quotient(x, grid), steps = nearest_steps(quotient, grid);
  return {quotient, steps, round_half_even(quotient), steps};
}

QSIM_HD Placed<float> place(ByThresholds, float x, const Entry<float>& grid) {
  const float clamped = clamp_keeping_nan(x, grid.lowest, grid.highest);
  const float quotient = ByThresholds::quotient(clamped, grid);
  return {quotient, round_half_even(quotient), x, clamped};
}

// A rule, the contract that it abbreviates, and whether the zero point is learned too.
template <class Base, class Exact, bool learns>
struct Learning : Base {
  using Contract = Exact;
  static constexpr bool learns_zero_point = learns;
};

template <class A>
struct LaneSums {
  bool unknown() const {  // a NaN among the elements or the gradients
    mask_t<A> nan{};
    for (const auto& sum : scale) nan |= sum != sum;
    return any((Ints)nan);
  }

  vector_t<A> scale[kParts]{}, zero_point[kParts]{};
};

// One register of a line of elements, of which the first `skip` were added before. The terms are those of scale_term
// and zero_point_term, but a NaN among x makes its sum NaN: callers look for that and turn to learn_few.
template <class Rule, class T, class GridOf>
QSIM_INLINE void learn_part(int part, const T* grad, const T* x, T* dx, const GridOf& grids, int skip,
                            vector_t<arithmetic_t<T>>& scale_sums, vector_t<arithmetic_t<T>>& zero_point_sums) {
  using A = arithmetic_t<T>;
  using Vector = vector_t<A>;
  constexpr int n = kElements<A>;
  const int first = part * n;
  A elements[n], quotients[n], steps[n], before[n], after[n];
  store_as(elements, load_arithmetic(x + first));
#pragma GCC unroll 1  // the vectoriser wants a loop
  for (int j = 0; j < n; ++j) {
    const Placed<A> placed = place(Rule{}, elements[j], grids[first + j]);
    quotients[j] = placed.quotient;
    steps[j] = placed.steps;
    before[j] = placed.before;
    after[j] = placed.after;
  }
  const auto inside = load_as<Vector>(before) == load_as<Vector>(after);
  Vector gradient = load_arithmetic(grad + first);
  store_where(inside, grad + first, dx + first);
  if (skip != 0) gradient = lane_numbers<A>() >= skip - first ? gradient : Vector{};
  const Vector rounded = load_as<Vector>(steps), error = rounded - load_as<Vector>(quotients);
  scale_sums += gradient * (inside ? error : rounded);
  if constexpr (Rule::learns_zero_point) zero_point_sums = inside ? zero_point_sums : zero_point_sums + gradient;
}

template <class Rule, class T, class GridOf>
QSIM_INLINE void learn_line(const T* grad, const T* x, T* dx, const GridOf& grids, int skip,
                            LaneSums<arithmetic_t<T>>& sums) {
  for (int part = 0; part < kParts; ++part) {
    learn_part<Rule>(part, grad, x, dx, grids, skip, sums.scale[part], sums.zero_point[part]);
  }
}

template <class A>
struct Sums {
  A scale = 0, zero_point = 0;
};

template <class Rule, class T, class A>
void learn_one(const T* grad, const T* x, T* dx, const Entry<A>& grid, Sums<A>& sums) {
  T padded[2][kElements<A>] = {{*grad}, {*x}};
  const A gradient = load_arithmetic(padded[0])[0], element = load_arithmetic(padded[1])[0];
  const A quotient = Rule::Contract::quotient(element, grid);
  sums.scale += scale_term(gradient, element, quotient, grid);
  sums.zero_point += zero_point_term(gradient, element, quotient, grid);
  *dx = in_range(quotient, grid) ? *grad : T{};
}

template <class A>
Sums<A> total(const Sums<A> (&lanes)[kLanes<A>]) {
  A scale[kLanes<A>], zero_point[kLanes<A>];
  for (int i = 0; i < kLanes<A>; ++i) {
    scale[i] = lanes[i].scale;
    zero_point[i] = lanes[i].zero_point;
  }
  return {sum_of_lanes<A>(scale), sum_of_lanes<A>(zero_point)};
}

// At most kTerms lines of one parameter; the last line overlaps the one before. One element at a time: for NaN among
// them, and for less than a line.
template <class Rule, class T, class A>
[[gnu::noinline]] Sums<A> learn_few(const T* grad, const T* x, T* dx, std::int64_t n, const Entry<A>& grid) {
  Sums<A> lanes[kLanes<A>];
  for (std::int64_t i = 0; i < n; i += kLanes<A>) {
    const std::int64_t at = std::max<std::int64_t>(0, std::min(i, n - kLanes<A>));
    for (std::int64_t e = i; e < std::min(n, i + kLanes<A>); ++e) {
      learn_one<Rule>(grad + e, x + e, dx + e, grid, lanes[e - at]);
    }
  }
  return total<A>(lanes);
}

template <class Rule, class T, class A>
QSIM_INLINE Sums<A> learn_run(const T* grad, const T* x, T* dx, std::int64_t n, const OneGrid<A>& grid) {
  if (n < kLanes<A>) return learn_few<Rule>(grad, x, dx, n, grid.grid);
  LaneSums<A> lanes;
  std::int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) learn_line<Rule>(grad + i, x + i, dx + i, grid, 0, lanes);
  if (i < n) {
    const std::int64_t last = n - kLanes<A>;
    learn_line<Rule>(grad + last, x + last, dx + last, grid, static_cast<int>(i - last), lanes);
  }
  const Sums<A> sums = {sum_of_lanes<A>(lanes.scale), sum_of_lanes<A>(lanes.zero_point)};
  if (sums.scale == sums.scale) [[likely]]
    return sums;
  return learn_few<Rule>(grad, x, dx, n, grid.grid);
}

template <class Rule, class T>
QSIM_INLINE void learn_runs(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, std::int64_t start,
                            std::int64_t parameter, const Grids<arithmetic_t<T>>& grids, const Layout& layout,
                            PartialSums sums) {
  using A = arithmetic_t<T>;
  constexpr std::int64_t longest = kTerms * kLanes<A>;
  runs_of_one(layout, grids, start, parameter, begin, end,
              [&](std::int64_t at, std::int64_t count, OneGrid<A> grid, std::int64_t column)
                  __attribute__((always_inline)) {
                    for (const std::int64_t stop = at + count; at < stop; at += longest) {
                      const std::int64_t n = std::min(stop - at, longest);
                      const Sums<A> found = learn_run<Rule>(grad + at, x + at, dx + at, n, grid);
                      sums.scale[column] += static_cast<double>(found.scale);
                      if (Rule::learns_zero_point) sums.zero_point[column] += static_cast<double>(found.zero_point);
                    }
                  });
}

// Grids of a line of columns: a copy that no result can overwrite stays in registers while the rows pass by.
template <class A>
struct GridLine {
  explicit QSIM_HD GridLine(const Grids<A>& grids) {
    for (int i = 0; i < kLanes<A>; ++i) {
      scale[i] = grids.scale[i];
      inverse[i] = grids.inverse[i];
      low[i] = grids.low[i];
      high[i] = grids.high[i];
      lowest[i] = grids.lowest[i];
      highest[i] = grids.highest[i];
    }
  }
  QSIM_HD Entry<A> operator[](std::int64_t i) const {
    return {{scale[i], low[i], high[i]}, inverse[i], lowest[i], highest[i]};
  }

  A scale[kLanes<A>], inverse[kLanes<A>], low[kLanes<A>], high[kLanes<A>], lowest[kLanes<A>], highest[kLanes<A>];
};

// The same for less than a line of columns, or with NaN among them: element by element.
template <class Rule, class T, class A>
[[gnu::noinline]] void learn_few_columns(const T* grad, const T* x, T* dx, std::int64_t width, std::int64_t rows,
                                         std::int64_t columns, const Grids<A>& grids, A* scale, A* zero_point) {
  for (std::int64_t column = 0; column < columns; ++column) {
    Sums<A> sums;
    for (std::int64_t at = column; at < rows * width; at += width) {
      learn_one<Rule>(grad + at, x + at, dx + at, entry(grids, column), sums);
    }
    scale[column] = sums.scale;
    zero_point[column] = sums.zero_point;
  }
}

// A few rows at a time: sums and grids of a line of columns stay in registers. The last line of a row overlaps the one
// before; its sums are its own.
template <class Rule, int rows, class T, class A>
QSIM_INLINE void learn_rows(const T* grad, const T* x, T* dx, std::int64_t width, std::int64_t columns,
                            const Grids<A>& grids, LaneSums<A>* lanes) {
  for (std::int64_t column = 0; column < columns; column += kLanes<A>, ++lanes) {
    const std::int64_t first = std::min(column, columns - kLanes<A>);
    const GridLine<A> line(offset(grids, first));
    for (int part = 0; part < kParts; ++part) {
      vector_t<A> scale = lanes->scale[part], zero_point = lanes->zero_point[part];
      for (int row = 0; row < rows; ++row) {
        const std::int64_t at = row * width + first;
        learn_part<Rule>(part, grad + at, x + at, dx + at, line, 0, scale, zero_point);
      }
      lanes->scale[part] = scale;
      lanes->zero_point[part] = zero_point;
    }
  }
}

template <class Rule, class A>
QSIM_INLINE void add_line(const A* scale, const A* zero_point, std::int64_t first, PartialSums to) {
  for (std::int64_t i = first; i < kLanes<A>; ++i) to.scale[i] += static_cast<double>(scale[i]);
  if constexpr (!Rule::learns_zero_point) return;
  for (std::int64_t i = first; i < kLanes<A>; ++i) to.zero_point[i] += static_cast<double>(zero_point[i]);
}

// At most kTerms rows of `columns` neighbouring parameters, a line or more.
template <class Rule, class T, class A>
QSIM_INLINE void learn_columns(const T* grad, const T* x, T* dx, std::int64_t width, std::int64_t rows,
                               std::int64_t columns, const Grids<A>& grids, LaneSums<A>* lanes, PartialSums to) {
  constexpr int kRows = 4;
  std::fill_n(lanes, (columns + kLanes<A> - 1) / kLanes<A>, LaneSums<A>{});
  std::int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    learn_rows<Rule, kRows>(grad + row * width, x + row * width, dx + row * width, width, columns, grids, lanes);
  }
  for (; row < rows; ++row) {
    learn_rows<Rule, 1>(grad + row * width, x + row * width, dx + row * width, width, columns, grids, lanes);
  }
  for (std::int64_t column = 0; column < columns; column += kLanes<A>, ++lanes) {
    const std::int64_t first = std::min(column, columns - kLanes<A>);
    A scale[kLanes<A>], zero_point[kLanes<A>];
    std::memcpy(scale, lanes->scale, kLineBytes);
    std::memcpy(zero_point, lanes->zero_point, kLineBytes);
    if (lanes->unknown()) [[unlikely]] {
      learn_few_columns<Rule>(grad + first, x + first, dx + first, width, rows, kLanes<A>, offset(grids, first), scale,
                              zero_point);
    }
    const PartialSums own = to.from(first);
    if (first == column) {
      add_line<Rule, A>(scale, zero_point, 0, own);  // a loop of known length
    } else {
      add_line<Rule, A>(scale, zero_point, column - first, own);
    }
  }
}

// Rows with a parameter for each of their elements; the last may be short.
template <class Rule, class T>
void learn_table(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                 const Grids<arithmetic_t<T>>& grids, std::int64_t width, PartialSums to) {
  using A = arithmetic_t<T>;
  constexpr std::int64_t kLines = 16, kColumns = kLines * kLanes<A>;  // sums and grids in the first-level cache
  LaneSums<A> lanes[kLines + 1];
  for (std::int64_t at = begin, rows; at < end; at += rows * width) {
    rows = std::clamp<std::int64_t>((end - at) / width, 1, kTerms);
    const std::int64_t length = std::min(width, end - at);
    for (std::int64_t column = 0, columns; column < length; column += columns) {
      columns = length - column < kColumns + kLanes<A> ? length - column : kColumns;
      const std::int64_t first = at + column;
      const Grids<A> own = offset(grids, column);
      const PartialSums sums = to.from(column);
      if (columns >= kLanes<A>) {
        learn_columns<Rule>(grad + first, x + first, dx + first, width, rows, columns, own, lanes, sums);
        continue;
      }
      A scale[kLanes<A>], zero_point[kLanes<A>];
      learn_few_columns<Rule>(grad + first, x + first, dx + first, width, rows, columns, own, scale, zero_point);
      for (std::int64_t i = 0; i < columns; ++i) {
        sums.scale[i] += static_cast<double>(scale[i]);
        if (Rule::learns_zero_point) sums.zero_point[i] += static_cast<double>(zero_point[i]);
      }
    }
  }
}

template <class Rule, class T>
[[gnu::noinline]] void learn_slices(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                                    const Grids<arithmetic_t<T>>& grids, const Layout& layout, Slices slices,
                                    PartialSums sums) {
  std::fill_n(sums.scale, (end - begin) * layout.width, 0.0);
  if (Rule::learns_zero_point) std::fill_n(sums.zero_point, (end - begin) * layout.width, 0.0);
  const std::int64_t segments = (layout.outer + layout.segment - 1) / layout.segment;
  std::int64_t segment = begin / slices.per_segment, part = begin % slices.per_segment;
  std::int64_t outer_end = (segment / segments + 1) * layout.outer;
  std::int64_t start = outer_end - layout.outer + segment % segments * layout.segment;
  for (std::int64_t slice = begin; slice < end; ++slice) {
    const std::int64_t stop = std::min(start + layout.segment, outer_end), parameter = segment * layout.width;
    const std::int64_t first = start + part * slices.length, last = std::min(first + slices.length, stop);
    if (layout.run == 1 && layout.width > 1) {
      learn_table<Rule>(grad, x, dx, first, last, offset(grids, parameter), layout.width, sums);
    } else {
      learn_runs<Rule>(grad, x, dx, first, last, start, parameter, grids, layout, sums);
    }
    sums = sums.from(layout.width);
    if (++part < slices.per_segment) continue;
    part = 0;
    ++segment;
    start = stop;
    if (start == outer_end) outer_end += layout.outer;
  }
}

// Tries the quotients that need no division. Only an underflow could make one of them differ from true division: a
// remainder of an x below 2^-100, as good as never. Then, or when tiny gradients underflow, the batch is done again.
template <bool learns, class T>
bool learn_regular(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                   const Grids<arithmetic_t<T>>& grids, const Layout& layout, Slices slices, PartialSums sums) {
  if constexpr (std::is_same_v<arithmetic_t<T>, float>) {
    using Rule = Learning<ByThresholds, ByContract<Rounding::divide>, learns>;
    if (!grids.regular) return false;
    const UnderflowWatch underflow;
    learn_slices<Rule>(grad, x, dx, begin, end, grids, layout, slices, sums);
    return !kFusedMultiplyAdd || !underflow.seen();
  }
  return false;
}

template <bool learns, class T>
void learn_batch(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end,
                 const Grids<arithmetic_t<T>>& grids, const Layout& layout, Rounding rounding, Slices slices,
                 PartialSums sums) {
  using Divide = ByContract<Rounding::divide>;
  using Reciprocal = ByContract<Rounding::reciprocal>;
  if (rounding == Rounding::reciprocal) {
    learn_slices<Learning<Reciprocal, Reciprocal, learns>>(grad, x, dx, begin, end, grids, layout, slices, sums);
  } else if (!learn_regular<learns>(grad, x, dx, begin, end, grids, layout, slices, sums)) {
    learn_slices<Learning<Divide, Divide, learns>>(grad, x, dx, begin, end, grids, layout, slices, sums);
  }
}

template <class T>
void learnable(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
               const Layout& layout, Rounding rounding, Slices slices, PartialSums sums) {
  constexpr std::int64_t kBatch = 32768;  // elements
  const auto learn = sums.zero_point != nullptr ? learn_batch<true, T> : learn_batch<false, T>;
  const std::int64_t batch = std::max<std::int64_t>(1, kBatch / slices.length);
  for (std::int64_t stop; begin < end; begin = stop) {
    stop = std::min(end, begin + batch);
    learn(grad, x, dx, begin, stop, grids, layout, rounding, slices, sums);
    sums = sums.from((stop - begin) * layout.width);
  }
}

// Adds rows to the first of them.
void add_rows(double* sums, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t row = 1; row < rows; ++row) {
    const double* more = sums + row * columns;
    QSIM_INDEPENDENT
    for (std::int64_t i = 0; i < columns; ++i) sums[i] += more[i];
  }
}

double sum_of(const double* sums, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += sums[i];
  return sum;
}

template <class T>
void fold(PartialSums sums, Slices slices, std::int64_t n, std::int64_t width, std::int64_t run, std::int64_t rows,
          const T* scale, double grad_factor, T* dscale, T* dzero_point) {
  const std::int64_t count = slices.per_segment * rows, row = width * run;
  for (std::int64_t parameter = 0; parameter < n; sums = sums.from(count * row)) {
    add_rows(sums.scale, count, row);
    if (sums.zero_point != nullptr) add_rows(sums.zero_point, count, row);
    for (std::int64_t column = 0; column < width; ++column, ++parameter) {
      dscale[parameter] = static_cast<T>(sum_of(sums.scale + column * run, run) * grad_factor);
      if (sums.zero_point == nullptr) continue;
      const double steps = sum_of(sums.zero_point + column * run, run);
      dzero_point[parameter] = static_cast<T>(steps * -static_cast<double>(scale[parameter]) * grad_factor);
    }
  }
}

}  // namespace

namespace QSIM_LEVEL {
const FakeQuantizeLearnableKernels fake_quantize_learnable_kernels = {
    learnable<float>, learnable<double>, learnable<Float16>, learnable<BFloat16>, fold<float>, fold<double>,
};
}

}  // namespace qsim::cpu
