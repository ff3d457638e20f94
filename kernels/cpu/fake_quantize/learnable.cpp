// The gradients of x, scale and zero point in one pass. The bindings call it through fake_quantize_learnable_kernels():
// slices of the tensor on any thread, partial sums of each, and then fold.
#include <algorithm>

#include "fake_quantize/learnable_terms.h"

#if !defined(__SSE2__)
#include <cfenv>
#endif

namespace qsim::cpu {

namespace {

template <class Rule, class T>
QSIM_INLINE void learn_runs(const T* grad, const T* x, T* dx, std::int64_t begin, std::int64_t end, std::int64_t start,
                            std::int64_t parameter, const Grids<arithmetic_t<T>>& grids, const Layout& layout,
                            PartialSums sums) {
  using A = arithmetic_t<T>;
  constexpr std::int64_t longest = kTerms * kLine<A>;
  for_each_shared_run(layout, GridTable(grids), start, parameter, begin, end,
                      [&](std::int64_t at, std::int64_t count, OneGrid<A> grid, std::int64_t column)
                          QSIM_INLINE_LAMBDA {
                            for (const std::int64_t stop = at + count; at < stop; at += longest) {
                              const std::int64_t n = std::min(stop - at, longest);
                              const Sums<A> found = learn_run<Rule>(grad + at, x + at, dx + at, n, grid);
                              sums.scale[column] += static_cast<double>(found.scale);
                              if (Rule::learns_zero_point)
                                sums.zero_point[column] += static_cast<double>(found.zero_point);
                            }
                          });
}

// Grids of a line of columns: a copy that no result can overwrite stays in registers while the rows pass by.
template <class A>
struct GridLine {
  explicit QSIM_INLINE GridLine(const Grids<A>& grids) {
    for (int i = 0; i < kLine<A>; ++i) {
      scale[i] = grids.scale[i];
      inverse[i] = grids.inverse[i];
      low[i] = grids.low[i];
      high[i] = grids.high[i];
      lowest[i] = grids.lowest[i];
      highest[i] = grids.highest[i];
    }
  }
  QSIM_INLINE PreparedGrid<A> operator[](std::int64_t i) const {
    return {{scale[i], low[i], high[i]}, inverse[i], lowest[i], highest[i]};
  }

  A scale[kLine<A>], inverse[kLine<A>], low[kLine<A>], high[kLine<A>], lowest[kLine<A>], highest[kLine<A>];
};

// The same for less than a line of columns, or with NaN among them: element by element.
template <class Rule, class T, class A>
[[gnu::noinline]] void learn_few_columns(const T* grad, const T* x, T* dx, std::int64_t width, std::int64_t rows,
                                         std::int64_t columns, const Grids<A>& grids, A* scale, A* zero_point) {
  for (std::int64_t column = 0; column < columns; ++column) {
    Sums<A> sums;
    for (std::int64_t at = column; at < rows * width; at += width) {
      learn_one<Rule>(grad + at, x + at, dx + at, grid_at(grids, column), sums);
    }
    scale[column] = sums.scale;
    zero_point[column] = sums.zero_point;
  }
}

// A few rows at a time: sums and grids of a line of columns stay in registers. The last line of a row overlaps the one
// before; its sums are its own.
template <class Rule, int rows, class T, class A>
QSIM_INLINE void learn_rows(const T* grad, const T* x, T* dx, std::int64_t width, std::int64_t columns,
                            const Grids<A>& grids, LineSums<A>* lanes) {
  for (std::int64_t column = 0; column < columns; column += kLine<A>, ++lanes) {
    const std::int64_t first = std::min(column, columns - kLine<A>);
    const GridLine<A> line(offset(grids, first));
    for (int part = 0; part < kLineRegisters; ++part) {
      register_t<A> scale = lanes->scale[part], zero_point = lanes->zero_point[part];
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
  for (std::int64_t i = first; i < kLine<A>; ++i) to.scale[i] += static_cast<double>(scale[i]);
  if constexpr (!Rule::learns_zero_point) return;
  for (std::int64_t i = first; i < kLine<A>; ++i) to.zero_point[i] += static_cast<double>(zero_point[i]);
}

// At most kTerms rows of `columns` neighbouring parameters, a line or more.
template <class Rule, class T, class A>
QSIM_INLINE void learn_columns(const T* grad, const T* x, T* dx, std::int64_t width, std::int64_t rows,
                               std::int64_t columns, const Grids<A>& grids, LineSums<A>* lanes, PartialSums to) {
  constexpr int kRowsAtOnce = 4;
  std::fill_n(lanes, (columns + kLine<A> - 1) / kLine<A>, LineSums<A>{});
  std::int64_t row = 0;
  for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce) {
    learn_rows<Rule, kRowsAtOnce>(grad + row * width, x + row * width, dx + row * width, width, columns, grids, lanes);
  }
  for (; row < rows; ++row) {
    learn_rows<Rule, 1>(grad + row * width, x + row * width, dx + row * width, width, columns, grids, lanes);
  }
  for (std::int64_t column = 0; column < columns; column += kLine<A>, ++lanes) {
    const std::int64_t first = std::min(column, columns - kLine<A>);
    A scale[kLine<A>], zero_point[kLine<A>];
    std::memcpy(scale, lanes->scale, kLineBytes);
    std::memcpy(zero_point, lanes->zero_point, kLineBytes);
    if (lanes->unknown()) [[unlikely]] {
      learn_few_columns<Rule>(grad + first, x + first, dx + first, width, rows, kLine<A>, offset(grids, first), scale,
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
  constexpr std::int64_t kLines = 16, kColumnsAtOnce = kLines * kLine<A>;  // sums and grids in the first-level cache
  LineSums<A> lanes[kLines + 1];
  for (std::int64_t at = begin, rows; at < end; at += rows * width) {
    rows = std::clamp<std::int64_t>((end - at) / width, 1, kTerms);
    const std::int64_t length = std::min(width, end - at);
    for (std::int64_t column = 0, columns; column < length; column += columns) {
      columns = length - column < kColumnsAtOnce + kLine<A> ? length - column : kColumnsAtOnce;
      const std::int64_t first = at + column;
      const Grids<A> own = offset(grids, column);
      const PartialSums sums = to.from(column);
      if (columns >= kLine<A>) {
        learn_columns<Rule>(grad + first, x + first, dx + first, width, rows, columns, own, lanes, sums);
        continue;
      }
      A scale[kLine<A>], zero_point[kLine<A>];
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

// Whether the processor had to round a result below the smallest normal number, from construction on. Keep the
// computation in a function that is not inlined: the compiler may move arithmetic past a reading of the status
// register.
class UnderflowWatch {
 public:
#if defined(__SSE2__)
  UnderflowWatch() {
    if (seen()) _mm_setcsr(_mm_getcsr() & ~kUnderflow);  // reading is cheaper than writing
  }
  bool seen() const { return (_mm_getcsr() & kUnderflow) != 0; }

 private:
  static constexpr unsigned kUnderflow = _MM_EXCEPT_UNDERFLOW;
#else
  UnderflowWatch() { std::feclearexcept(FE_UNDERFLOW); }
  bool seen() const { return std::fetestexcept(FE_UNDERFLOW) != 0; }
#endif
};

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
  constexpr std::int64_t kBatchElements = 32768;
  const auto learn = sums.zero_point != nullptr ? learn_batch<true, T> : learn_batch<false, T>;
  const std::int64_t batch = std::max<std::int64_t>(1, kBatchElements / slices.length);
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
    per_element<FakeQuantizeLearnable>([]<class T>() { return learnable<T>; }), fold<float>, fold<double>};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
