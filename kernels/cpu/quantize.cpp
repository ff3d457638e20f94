#include "qsim/quantize.h"

#include <algorithm>
#include <limits>

#include "half_tiles.h"
#include "quantize_lanes.h"

namespace qsim::cpu {

namespace {

template <Rounding rounding, class T, class Q, class GridOf>
QSIM_HD void quantize_run(const T* x, Q* q, std::int64_t n, GridOf grids, T quant_min) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = grids[i];
    const T integer = nearest_integer(quotient<rounding>(x[i], grid.scale), grid, quant_min);
    q[i] = static_cast<Q>(static_cast<std::int32_t>(integer));
  }
}

template <class T, class Q, class GridOf>
QSIM_HD void dequantize_run(const Q* q, T* y, std::int64_t n, GridOf grids) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = grids[i];
    y[i] = dequantize(steps_of(static_cast<T>(q[i]), grid, T(std::numeric_limits<Q>::min())), grid.scale);
  }
}

// To the letter, in tiles.
template <Rounding rounding, class T, class Q>
void quantize_range(const T* x, Q* q, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                    const Layout& layout, arithmetic_t<T> quant_min) {
  for_each_run(layout, grids, begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffer[kBuffer<T>];
    quantize_run<rounding>(load_tile(x + at, n, buffer), q + at, n, grid, quant_min);
  });
}

// The last step overlaps the one before.
template <class T, class Q, class GridOf>
QSIM_INLINE void quantize_regular(const T* x, Q* q, std::int64_t n, const GridOf& grids, float quant_min) {
  if (n < kStep) {
    float buffer[kStep];
    return quantize_run<Rounding::divide>(load_tile(x, n, buffer), q, n, grids, quant_min);
  }
  const Q first = static_cast<Q>(static_cast<std::int32_t>(quant_min));
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) StepGrids(grids.after(i)).quantize(x + i, q + i, first);
  if (i < n) StepGrids(grids.after(n - kStep)).quantize(x + n - kStep, q + n - kStep, first);
}

// Rows of a table: the grids of a few columns stay in registers while the rows pass.
template <class T, class Q>
void quantize_columns(const T* x, Q* q, std::int64_t rows, std::int64_t width, const Grids<float>& grids,
                      float quant_min) {
  const Q first = static_cast<Q>(static_cast<std::int32_t>(quant_min));
  for (std::int64_t column = 0; column < width; column += kStep) {
    const std::int64_t at = std::min(column, width - kStep);
    const StepGrids own(from(grids, at));
    for (std::int64_t i = at; i < rows * width; i += width) own.quantize(x + i, q + i, first);
  }
}

// Elements [begin, end) of a segment that starts at `start`; `grids` from its first column on.
template <class T, class Q>
void quantize_rows(const T* x, Q* q, std::int64_t begin, std::int64_t end, std::int64_t start, std::int64_t width,
                   const Grids<float>& grids, float quant_min) {
  constexpr std::int64_t kTileElements = 4096, kFewRows = 4;  // in the cache, and worth loading the grids
  while (begin < end) {
    const std::int64_t column = (begin - start) % width, rest = std::min(width - column, end - begin);
    const std::int64_t rows = std::min((end - begin) / width, std::max(kTileElements / width, kFewRows));
    if (column > 0 || rows < 2 || width < kStep) {
      quantize_regular(x + begin, q + begin, rest, from(grids, column), quant_min);
      begin += rest;
    } else {
      quantize_columns(x + begin, q + begin, rows, width, grids, quant_min);
      begin += rows * width;
    }
  }
}

template <class T, class Q>
void quantize_regular_range(const T* x, Q* q, std::int64_t begin, std::int64_t end, const Grids<float>& grids,
                            const Layout& layout, float quant_min) {
  for_each_run(
      layout, grids, begin, end,
      [&](std::int64_t at, std::int64_t n, const OneGrid<float>& grid)
          __attribute__((always_inline)) { quantize_regular(x + at, q + at, n, grid, quant_min); },
      [&](std::int64_t at, std::int64_t n, std::int64_t start, std::int64_t parameter) {
        quantize_rows(x, q, at, at + n, start, layout.width, offset(grids, parameter), quant_min);
      });
}

template <class T, class Q>
void quantize(const T* x, Q* q, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
              const Layout& layout, arithmetic_t<T> quant_min, Rounding rounding) {
  if (rounding == Rounding::reciprocal) {
    return quantize_range<Rounding::reciprocal>(x, q, begin, end, grids, layout, quant_min);
  }
  if constexpr (sizeof(T) < sizeof(double)) {
    if (grids.regular) return quantize_regular_range(x, q, begin, end, grids, layout, quant_min);
  }
  quantize_range<Rounding::divide>(x, q, begin, end, grids, layout, quant_min);
}

template <class T, class Q>
void dequantize_range(const Q* q, T* y, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
                      const Layout& layout) {
  for_each_run(layout, grids, begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffer[kBuffer<T>];
    auto* to = result_tile(y + at, buffer);
    dequantize_run(q + at, to, n, grid);
    store_tile(to, n, y + at);
    drop_sign_of_zero(y + at, n);
  });
}

template <class T>
constexpr Quantize<T> kernels_of = {quantize<T, std::uint8_t>,         quantize<T, std::uint16_t>,
                                    dequantize_range<T, std::int8_t>,  dequantize_range<T, std::uint8_t>,
                                    dequantize_range<T, std::int16_t>, dequantize_range<T, std::uint16_t>};

}  // namespace

namespace QSIM_LEVEL {
const QuantizeKernels quantize_kernels = {kernels_of<float>, kernels_of<double>, kernels_of<Float16>,
                                          kernels_of<BFloat16>};
}

}  // namespace qsim::cpu
