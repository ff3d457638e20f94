// The forward pass, and the preparation of grids that all of fake-quantize starts with. The bindings call it through
// fake_quantize_kernels(): first `prepare` (and `repeat`, for short rows), then ranges of elements on any thread.
//
// Which loop takes what: rows with a grid per column, rows.h; all else, run.h. Each quantizes as grids.h says.
#include <algorithm>
#include <type_traits>

#include "fake_quantize/rows.h"

namespace qsim::cpu {

namespace {

// float64 has no wider type to find thresholds in: its grids go by the contract.
bool is_regular(Grid<double>) { return false; }
void find_thresholds(Grids<double>, std::int64_t) {}

void find_thresholds(Grids<float> grids, std::int64_t n) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Thresholds found = thresholds(grid_at(grids, i));
    grids.lowest[i] = found.lowest;
    grids.highest[i] = found.highest;
  }
}

template <class T, class Z>
bool prepare(const T* scale, const Z* zero_point, std::int64_t n, T quant_min, T quant_max, Bounds bounds,
             Grids<T> to) {
  int irregular = 0;
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = make_grid<T>(scale[i], static_cast<T>(zero_point[i]), quant_min, quant_max);
    to.scale[i] = grid.scale;
    to.inverse[i] = T(1) / grid.scale;
    to.low[i] = grid.low;
    to.high[i] = grid.high;
    to.lowest[i] = grid.low * grid.scale;
    to.highest[i] = grid.high * grid.scale;
    irregular |= is_regular(grid) ? 0 : 1;
  }
  if (irregular) return false;
  if (bounds == Bounds::of_range) find_thresholds(to, n);
  return true;
}

template <class T>
void repeat(Grids<T> from, std::int64_t n, std::int64_t run, std::int64_t rows, Grids<T> to) {
  for (const auto array :
       {&Grids<T>::scale, &Grids<T>::inverse, &Grids<T>::low, &Grids<T>::high, &Grids<T>::lowest, &Grids<T>::highest}) {
    T* at = to.*array;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < n; ++i) at = std::fill_n(at, run, (from.*array)[i]);
    }
  }
}

template <class Rule, class T, class Bits>
void quantize_any(const T* x, T* y, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                  const Layout& layout, Bits& bits) {
  for_each_run_or_rows(
      layout, GridTable(grids), begin, end,
      [&](std::int64_t at, std::int64_t n, const OneGrid<arithmetic_t<T>>& grid)
          QSIM_INLINE_LAMBDA { quantize_run<Rule>(x + at, y + at, n, grid, bits); },
      [&](std::int64_t at, std::int64_t n, std::int64_t start, std::int64_t parameter) {
        quantize_rows<Rule>(x, y, at, n, start, layout, offset(grids, parameter), bits);
      });
}

template <class Rule, class T, class Bits>
void quantize_range(const T* x, T* y, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                    const Layout& layout, Bits& bits) {
  if constexpr (std::is_same_v<Rule, ByThresholds>) {
    const EqualRuns equal = equal_runs(layout, end);
    const std::int64_t first = (begin + equal.length - 1) / equal.length, last = end / equal.length;
    if (equal.length >= kFloats && first < last) {
      quantize_any<Rule>(x, y, begin, first * equal.length, grids, layout, bits);
      for (std::int64_t run = first; run < last;) {
        const std::int64_t count = std::min(last - run, equal.period - run % equal.period), at = run * equal.length;
        const Grids<float> own = offset(grids, run % equal.period);
        const std::int64_t done = quantize_blocks<Rule>(x + at, y + at, count, equal.length, own, bits);
        const std::int64_t skipped = done * equal.length + at;
        quantize_runs(x + skipped, y + skipped, count - done, equal.length, offset(own, done), bits);
        run += count;
      }
      begin = last * equal.length;
    }
  }
  quantize_any<Rule>(x, y, begin, end, grids, layout, bits);
}

template <class T, class Bits>
void quantize(const T* x, T* y, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
              const Layout& layout, Rounding rounding, Bits bits) {
  if (rounding == Rounding::reciprocal) {
    quantize_range<ByContract<Rounding::reciprocal>>(x, y, begin, end, grids, layout, bits);
  } else if (!grids.regular) {
    quantize_range<ByContract<Rounding::divide>>(x, y, begin, end, grids, layout, bits);
  } else if constexpr (sizeof(T) < sizeof(double)) {
    quantize_range<ByThresholds>(x, y, begin, end, grids, layout, bits);
  }
  bits.finish();
}

template <class T>
void forward(const T* x, T* y, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids, const Layout& layout,
             Rounding rounding) {
#if defined(__AVX512F__)
  // A register of half the width is broadcast to at half the cost and wastes less at the end of a run.
  if constexpr (std::is_same_v<T, float>) {
    const std::int64_t length = equal_runs(layout, end).length;
    if (kFloats / 2 <= length && length <= kChunk / 2 && (length <= kWord || kChunk % length != 0)) {
      return v3::fake_quantize_kernels.f32.forward(x, y, begin, end, grids, layout, rounding);
    }
  }
#endif
  quantize(x, y, begin, end, grids, layout, rounding, NoBits());
}

template <class T>
void with_mask(const T* x, T* y, std::uint8_t* mask, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
               const Layout& layout, Rounding rounding) {
  quantize(x, y, begin, end, grids, layout, rounding, BitWriter(mask + begin / 8));
}

}  // namespace

namespace QSIM_LEVEL {
const FakeQuantizeKernels fake_quantize_kernels = {
    per_element<FakeQuantize>([]<class T>() { return FakeQuantize<T>{forward<T>, with_mask<T>}; }),
    {prepare<float, std::int32_t>, prepare<float, float>, repeat<float>},
    {prepare<double, std::int32_t>, prepare<double, double>, repeat<double>},
};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
