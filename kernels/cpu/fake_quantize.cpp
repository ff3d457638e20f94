#include "qsim/fake_quantize.h"

#include <algorithm>
#include <cstring>

#include "bits.h"
#include "fake_quantize_rules.h"
#include "half_tiles.h"

namespace qsim::cpu {

namespace {

// float64 has no wider type to find thresholds in: its grids go by the contract.
template <class T>
QSIM_HD bool find_thresholds(Grid<T>, T&, T&) {
  return false;
}
QSIM_HD bool find_thresholds(Grid<float> grid, float& lowest, float& highest) {
  const Thresholds found = thresholds(grid);
  lowest = found.lowest;
  highest = found.highest;
  return is_regular(grid);
}

template <class T, class Z>
bool prepare(const T* scale, const Z* zero_point, std::int64_t n, T quant_min, T quant_max, Grids<T> to) {
  int irregular = 0;
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = make_grid<T>(scale[i], static_cast<T>(zero_point[i]), quant_min, quant_max);
    to.scale[i] = grid.scale;
    to.inverse[i] = T(1) / grid.scale;
    to.low[i] = grid.low;
    to.high[i] = grid.high;
    irregular |= find_thresholds(grid, to.lowest[i], to.highest[i]) ? 0 : 1;
  }
  return irregular == 0;
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

// A vector of elements and the grids from the first of them on.
template <class Rule, class GridOf>
QSIM_INLINE Quantized<Floats> quantize(Floats x, const GridOf& grids, int n = kWidth) {
  float elements[kWidth], values[kWidth] = {}, before[kWidth] = {}, after[kWidth] = {};
  store(elements, x);
  for (int j = 0; j < n; ++j) {
    const Quantized<float> one = Rule::quantize(elements[j], grids[j]);
    values[j] = one.value;
    before[j] = one.before_clamp;
    after[j] = one.after_clamp;
  }
  return {load(values), load(before), load(after)};
}

QSIM_INLINE void store_result(float* to, Floats y) { store(to, y); }

// Rounding to 16 bits can underflow to -0.0; a zero result is +0.0.
template <class Half>
QSIM_INLINE void store_result(Half* to, Floats y) {
  round_to(to, y);
  const Shorts bits = load_as<Shorts>(to);
  store_as(to, (Shorts)(bits != 0x8000) & bits);
}

QSIM_INLINE std::uint32_t bits_in_range(const Quantized<Floats>& q) {
  return equal_bits(q.before_clamp, q.after_clamp);
}

// Writers of masks, and what takes their place when no mask is wanted.
struct NoBits {
  QSIM_HD void push(std::uint32_t, int) {}
  void finish() {}
};

template <class Rule, class T, class GridOf, class Bits>
QSIM_HD void quantize_few(const T* x, T* y, int n, GridOf grids, Bits& bits) {
  T padded[kWidth] = {};
  std::memcpy(padded, x, static_cast<std::size_t>(n) * sizeof(T));
  const Quantized<Floats> q = quantize<Rule>(load(padded), grids, n);
  store_result(padded, q.value);
  std::memcpy(y, padded, static_cast<std::size_t>(n) * sizeof(T));
  bits.push(bits_in_range(q) & ((1u << n) - 1), n);
}

// The last vector overlaps the one before. In place, it must be read before that is written.
template <class Rule, class T, class GridOf, class Bits>
QSIM_HD void quantize_run(const T* x, T* y, std::int64_t n, GridOf grids, Bits& bits) {
  constexpr int kStep = 32;
  if (n < kWidth) return quantize_few<Rule>(x, y, static_cast<int>(n), grids, bits);
  const int left = static_cast<int>(n % kWidth);
  Quantized<Floats> last;
  if (left != 0) last = quantize<Rule>(load(x + n - kWidth), grids.after(n - kWidth));
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    std::uint32_t word = 0;
    for (int j = 0; j < kStep; j += kWidth) {
      const Quantized<Floats> q = quantize<Rule>(load(x + i + j), grids.after(i + j));
      store_result(y + i + j, q.value);
      word |= bits_in_range(q) << j;
    }
    bits.push(word, kStep);
  }
  for (; i + kWidth <= n; i += kWidth) {
    const Quantized<Floats> q = quantize<Rule>(load(x + i), grids.after(i));
    store_result(y + i, q.value);
    bits.push(bits_in_range(q), kWidth);
  }
  if (left == 0) return;
  store_result(y + n - kWidth, last.value);
  bits.push(bits_in_range(last) >> (kWidth - left), left);
}

template <class Rule, class GridOf>
QSIM_HD void quantize_run(const double* x, double* y, std::int64_t n, GridOf grids, NoBits&) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) y[i] = Rule::quantize(x[i], grids[i]).value;
}

template <class Rule, class GridOf>
QSIM_HD void quantize_run(const double* x, double* y, std::int64_t n, GridOf grids, BitWriter& bits) {
  for (std::int64_t i = 0; i < n; i += 32) {
    const int count = static_cast<int>(std::min<std::int64_t>(n - i, 32));
    std::int64_t flags[32] = {};
    QSIM_INDEPENDENT
    for (int j = 0; j < count; ++j) {
      const Quantized<double> one = Rule::quantize(x[i + j], grids[i + j]);
      y[i + j] = one.value;
      flags[j] = one.before_clamp == one.after_clamp ? -1 : 0;
    }
    bits.push(signs_of_32(flags), count);
  }
}

template <class Rule, class T, class Bits>
void quantize_range(const T* x, T* y, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                    const Layout& layout, Bits& bits) {
  for_each_run(layout, grids, begin, end, INT64_MAX,
               [&](std::int64_t at, std::int64_t n, auto grid) { quantize_run<Rule>(x + at, y + at, n, grid, bits); });
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
    {forward<float>, with_mask<float>},
    {forward<double>, with_mask<double>},
    {forward<Float16>, with_mask<Float16>},
    {forward<BFloat16>, with_mask<BFloat16>},
    {prepare<float, std::int32_t>, prepare<float, float>, repeat<float>},
    {prepare<double, std::int32_t>, prepare<double, double>, repeat<double>},
};
}

}  // namespace qsim::cpu
