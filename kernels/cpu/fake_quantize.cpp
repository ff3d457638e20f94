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

template <Rounding rounding, class T, class GridOf>
QSIM_HD void quantize_with_flags(const T* x, T* y, std::uint8_t* flags, std::int64_t n, GridOf grids) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = grids[i];
    const T exact = quotient<rounding>(x[i], grid.scale);
    flags[i] = in_range(exact, grid) ? 0xff : 0;
    y[i] = dequantize(nearest_steps(exact, grid), grid.scale);
  }
}

template <Rounding rounding, class T>
void forward_range(const T* x, T* y, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                   const Layout& layout) {
  using A = arithmetic_t<T>;
  constexpr bool in_memory = sizeof(T) == sizeof(A);
  A buffer[in_memory ? 1 : kTile];
  for (std::int64_t first = begin, n; first < end; first += n) {
    n = in_memory ? end - first : std::min(kTile, end - first);
    const A* from = load_tile(x + first, n, buffer);
    A* to = result_tile(y + first, buffer);
    for_each_run(layout, grids, first, first + n, [&](std::int64_t at, std::int64_t count, auto grid, std::int64_t) {
      quantize<rounding>(from + (at - first), to + (at - first), count, grid);
    });
    store_tile(to, n, y + first);
    drop_sign_of_zero(y + first, n);
  }
}

template <Rounding rounding, class T>
void with_mask_range(const T* x, T* y, std::uint8_t* mask, std::int64_t begin, std::int64_t end,
                     const Grids<arithmetic_t<T>>& grids, const Layout& layout) {
  using A = arithmetic_t<T>;
  A buffer[sizeof(T) == sizeof(A) ? 1 : kTile];
  std::uint8_t flags[kTile];
  for (std::int64_t first = begin; first < end; first += kTile) {
    const std::int64_t n = std::min(kTile, end - first);
    const A* from = load_tile(x + first, n, buffer);
    A* to = result_tile(y + first, buffer);
    for_each_run(layout, grids, first, first + n, [&](std::int64_t at, std::int64_t count, auto grid, std::int64_t) {
      quantize_with_flags<rounding>(from + (at - first), to + (at - first), flags + (at - first), count, grid);
    });
    store_tile(to, n, y + first);
    drop_sign_of_zero(y + first, n);
    pack_bits(flags, n, mask + first / 8);
  }
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
