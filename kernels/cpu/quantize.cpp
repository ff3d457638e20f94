#include "qsim/quantize.h"

#include <limits>

#include "fake_quantize_runs.h"
#include "half_tiles.h"

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

template <Rounding rounding, class T, class Q>
void quantize_range(const T* x, Q* q, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                    const Layout& layout, arithmetic_t<T> quant_min) {
  for_each_run(layout, grids, begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffer[kBuffer<T>];
    quantize_run<rounding>(load_tile(x + at, n, buffer), q + at, n, grid, quant_min);
  });
}

template <class T, class Q>
void quantize(const T* x, Q* q, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
              const Layout& layout, arithmetic_t<T> quant_min, Rounding rounding) {
  const auto range = rounding == Rounding::divide ? quantize_range<Rounding::divide, T, Q>
                                                  : quantize_range<Rounding::reciprocal, T, Q>;
  range(x, q, begin, end, grids, layout, quant_min);
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
