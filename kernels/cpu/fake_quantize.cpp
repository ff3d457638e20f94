#include "qsim/fake_quantize.h"

#include <algorithm>

#include "bits.h"
#include "fake_quantize_runs.h"
#include "half_tiles.h"

namespace qsim::cpu {

namespace {

template <class T, class Z>
void prepare(const T* scale, const Z* zero_point, std::int64_t n, T quant_min, T quant_max, Grids<T> to) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = make_grid<T>(scale[i], static_cast<T>(zero_point[i]), quant_min, quant_max);
    to.scale[i] = grid.scale;
    to.low[i] = grid.low;
    to.high[i] = grid.high;
  }
}

template <class T>
void repeat(Grids<T> from, std::int64_t n, std::int64_t run, std::int64_t rows, Grids<T> to) {
  std::int64_t at = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < run; ++j, ++at) {
        to.scale[at] = from.scale[i];
        to.low[at] = from.low[i];
        to.high[at] = from.high[i];
      }
    }
  }
}

template <Rounding rounding, class T, class GridOf>
QSIM_HD void quantize(const T* x, T* y, std::int64_t n, GridOf grids) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = grids[i];
    y[i] = dequantize(nearest_steps(quotient<rounding>(x[i], grid.scale), grid), grid.scale);
  }
}

template <Rounding rounding, class T>
QSIM_HD T quantize_with_flag(T x, Grid<T> grid, flag_t<T>& flag) {
  const T exact = quotient<rounding>(x, grid.scale);
  flag = in_range(exact, grid) ? -1 : 0;
  return dequantize(nearest_steps(exact, grid), grid.scale);
}

// 32 elements at a time: the vectors of flags stay in registers.
template <Rounding rounding, class T, class GridOf>
QSIM_HD void quantize_with_bits(const T* x, T* y, BitWriter& bits, std::int64_t n, GridOf grids) {
  for (; n >= 32; n -= 32, x += 32, y += 32, grids = grids.after(32)) {
    flag_t<T> flags[32];
    QSIM_INDEPENDENT
    for (int i = 0; i < 32; ++i) y[i] = quantize_with_flag<rounding>(x[i], grids[i], flags[i]);
    bits.push(signs_of_32(flags), 32);
  }
  if (n == 0) return;
  flag_t<T> flags[32] = {};
  QSIM_INDEPENDENT
  for (int i = 0; i < static_cast<int>(n); ++i) y[i] = quantize_with_flag<rounding>(x[i], grids[i], flags[i]);
  bits.push(signs_of_32(flags), static_cast<int>(n));
}

template <Rounding rounding, class T>
void forward_range(const T* x, T* y, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                   const Layout& layout) {
  for_each_run(layout, grids, begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffer[kBuffer<T>];
    const auto* from = load_tile(x + at, n, buffer);
    auto* to = result_tile(y + at, buffer);
    quantize<rounding>(from, to, n, grid);
    store_tile(to, n, y + at);
    drop_sign_of_zero(y + at, n);
  });
}

template <Rounding rounding, class T>
void with_mask_range(const T* x, T* y, std::uint8_t* mask, std::int64_t begin, std::int64_t end,
                     const Grids<arithmetic_t<T>>& grids, const Layout& layout) {
  BitWriter bits(mask + begin / 8);
  for_each_run(layout, grids, begin, end, kLongestRun<T>, [&](std::int64_t at, std::int64_t n, auto grid) {
    arithmetic_t<T> buffer[kBuffer<T>];
    const auto* from = load_tile(x + at, n, buffer);
    auto* to = result_tile(y + at, buffer);
    quantize_with_bits<rounding>(from, to, bits, n, grid);
    store_tile(to, n, y + at);
    drop_sign_of_zero(y + at, n);
  });
  bits.finish();
}

template <class T>
void forward(const T* x, T* y, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids, const Layout& layout,
             Rounding rounding) {
  const auto range =
      rounding == Rounding::divide ? forward_range<Rounding::divide, T> : forward_range<Rounding::reciprocal, T>;
  range(x, y, begin, end, grids, layout);
}

template <class T>
void with_mask(const T* x, T* y, std::uint8_t* mask, std::int64_t begin, std::int64_t end, Grids<arithmetic_t<T>> grids,
               const Layout& layout, Rounding rounding) {
  const auto range =
      rounding == Rounding::divide ? with_mask_range<Rounding::divide, T> : with_mask_range<Rounding::reciprocal, T>;
  range(x, y, mask, begin, end, grids, layout);
}

}  // namespace

namespace QSIM_LEVEL {
const FakeQuantizeKernels fake_quantize_kernels = {
    {forward<float>, with_mask<float>},
    {forward<double>, with_mask<double>},
    {forward<Float16>, with_mask<Float16>},
    {forward<BFloat16>, with_mask<BFloat16>},
    {prepare<float, std::int32_t>, prepare<float, float>, repeat<float>},
    {prepare<double, std::int32_t>, prepare<double, double>, repeat<double>},
};
}

}  // namespace qsim::cpu
