// The integers of fake-quantize stored, and read again. The bindings call it through quantize_kernels(): ranges of
// elements on any thread.
#include "qsim/quantize.h"

#include <algorithm>
#include <limits>

#include "fake_quantize/grids.h"
#include "vector/convert.h"
#include "vector/pack.h"

namespace qsim::cpu {

namespace {

template <Rounding rounding, class T, class Q, class GridOf>
QSIM_INLINE void quantize_run(const T* x, Q* q, std::int64_t n, GridOf grids, T quant_min) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = grids[i];
    const T integer = nearest_integer(quotient<rounding>(x[i], grid.scale), grid, quant_min);
    q[i] = static_cast<Q>(static_cast<std::int32_t>(integer));
  }
}

template <class T, class Q, class GridOf>
QSIM_INLINE void dequantize_run(const Q* q, T* y, std::int64_t n, GridOf grids) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = grids[i];
    y[i] = dequantize(steps_of(static_cast<T>(q[i]), grid, T(std::numeric_limits<Q>::min())), grid.scale);
  }
}

// To the letter, in pieces that fit the buffer of a conversion.
template <Rounding rounding, class T, class Q>
void quantize_range(const T* x, Q* q, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                    const Layout& layout, arithmetic_t<T> quant_min) {
  for_each_run(layout, GridTable(grids), begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffer[kBuffer<T>];
    quantize_run<rounding>(converted(x + at, n, buffer), q + at, n, grid, quant_min);
  });
}

QSIM_INLINE Ints lows(const OneGrid<float>& one) { return nearest_integers(all(one.grid.low)); }
QSIM_INLINE Ints lows(const GridPerElement<float>& per_element) {
  return nearest_integers(load(per_element.grids.low));
}

// The grids of kPacked elements, in registers if there are enough.
struct PackedGrids {
  template <class GridOf>
  explicit QSIM_INLINE PackedGrids(const GridOf& grids) {
    for (int v = 0; v < kPackedRegisters; ++v) {
      grid[v] = in_registers(grids.after(v * kFloats));
      low[v] = lows(grids.after(v * kFloats));
    }
  }

  // Without a lower clamp: what lies below its grid becomes a negative number, NaN and what overflows the least Int,
  // and all of them 0 when they are packed.
  template <class T, class Q>
  QSIM_INLINE void quantize(const T* x, Q* q, Q quant_min) const {
    Ints above[kPackedRegisters];
    for (int v = 0; v < kPackedRegisters; ++v) {
      const Floats element = load(x + v * kFloats), highest = grid[v].highest;
      const Floats clamped = highest < element ? highest : element;  // NaN as well
      above[v] = nearest_integers(ByThresholds::quotient(clamped, grid[v])) - low[v];
    }
    store_packed(above, quant_min, q);
  }

  RegisterGrid grid[kPackedRegisters];
  Ints low[kPackedRegisters];
};

// The last group of integers overlaps the one before.
template <class T, class Q, class GridOf>
QSIM_INLINE void quantize_regular(const T* x, Q* q, std::int64_t n, const GridOf& grids, float quant_min) {
  if (n < kPacked) {
    float buffer[kPacked];
    return quantize_run<Rounding::divide>(converted(x, n, buffer), q, n, grids, quant_min);
  }
  const Q first = static_cast<Q>(static_cast<std::int32_t>(quant_min));
  std::int64_t i = 0;
  for (; i + kPacked <= n; i += kPacked) PackedGrids(grids.after(i)).quantize(x + i, q + i, first);
  if (i < n) PackedGrids(grids.after(n - kPacked)).quantize(x + n - kPacked, q + n - kPacked, first);
}

// Rows of a table: the grids of a few columns stay in registers while the rows pass.
template <class T, class Q>
void quantize_columns(const T* x, Q* q, std::int64_t rows, std::int64_t width, const Grids<float>& grids,
                      float quant_min) {
  const Q first = static_cast<Q>(static_cast<std::int32_t>(quant_min));
  for (std::int64_t column = 0; column < width; column += kPacked) {
    const std::int64_t at = std::min(column, width - kPacked);
    const PackedGrids own(grids_from(grids, at));
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
    if (column > 0 || rows < 2 || width < kPacked) {
      quantize_regular(x + begin, q + begin, rest, grids_from(grids, column), quant_min);
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
  for_each_run_or_rows(
      layout, GridTable(grids), begin, end,
      [&](std::int64_t at, std::int64_t n, const OneGrid<float>& grid)
          QSIM_INLINE_LAMBDA { quantize_regular(x + at, q + at, n, grid, quant_min); },
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

// Rounding to 16 bits can underflow to -0.0; a zero result is +0.0.
QSIM_INLINE void drop_signs_of_zeros(float*, std::int64_t) {}
QSIM_INLINE void drop_signs_of_zeros(double*, std::int64_t) {}
template <class Half>
QSIM_INLINE void drop_signs_of_zeros(Half* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i].bits = y[i].bits == 0x8000 ? 0 : y[i].bits;
}

template <class T, class Q>
void dequantize_range(const Q* q, T* y, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
                      const Layout& layout) {
  for_each_run(layout, GridTable(grids), begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffer[kBuffer<T>];
    auto* to = results_for(y + at, buffer);
    dequantize_run(q + at, to, n, grid);
    store_converted(to, n, y + at);
    drop_signs_of_zeros(y + at, n);
  });
}

template <class T>
constexpr Quantize<T> kernels_of = {quantize<T, std::uint8_t>,         quantize<T, std::uint16_t>,
                                    dequantize_range<T, std::int8_t>,  dequantize_range<T, std::uint8_t>,
                                    dequantize_range<T, std::int16_t>, dequantize_range<T, std::uint16_t>};

}  // namespace

namespace QSIM_LEVEL {
const QuantizeKernels quantize_kernels = {per_element<Quantize>([]<class T>() { return kernels_of<T>; })};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
