#include "qsim/fake_quantize.h"

#include <algorithm>
#include <type_traits>

#include "bits.h"
#include "fake_quantize_rules.h"
#include "half_tiles.h"

namespace qsim::cpu {

namespace {

// float64 has no wider type to find thresholds in: its grids go by the contract.
bool find_bounds(Grids<double>, std::int64_t, Bounds) { return false; }

bool find_bounds(Grids<float> grids, std::int64_t n, Bounds bounds) {
  int irregular = 0;
  for (std::int64_t i = 0; i < n; ++i) irregular |= is_regular(entry(grids, i)) ? 0 : 1;
  if (irregular) return false;
  if (bounds == Bounds::of_values) {
    QSIM_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) {
      grids.lowest[i] = grids.low[i] * grids.scale[i];
      grids.highest[i] = grids.high[i] * grids.scale[i];
    }
    return true;
  }
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Thresholds found = thresholds(entry(grids, i));
    grids.lowest[i] = found.lowest;
    grids.highest[i] = found.highest;
  }
  return true;
}

template <class T, class Z>
bool prepare(const T* scale, const Z* zero_point, std::int64_t n, T quant_min, T quant_max, Bounds bounds,
             Grids<T> to) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    const Grid<T> grid = make_grid<T>(scale[i], static_cast<T>(zero_point[i]), quant_min, quant_max);
    to.scale[i] = grid.scale;
    to.inverse[i] = T(1) / grid.scale;
    to.low[i] = grid.low;
    to.high[i] = grid.high;
  }
  return find_bounds(to, n, bounds);
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

template <class Rule>
QSIM_INLINE void store_result(Rule, float* to, Floats y) {
  store(to, y);
}
template <class Rule, class Half>
QSIM_INLINE void store_result(Rule, Half* to, Floats y) {
  round_to(to, y);
  drop_sign_of_zero(to);
}
QSIM_INLINE void store_result(ByThresholds, BFloat16* to, Floats y) { round_to(to, y); }  // scales are 2^-100 at least

QSIM_INLINE std::uint32_t bits_in_range(const Quantized<Floats>& q) {
  return equal_bits(q.before_clamp, q.after_clamp);
}

// Writers of masks, and what takes their place when no mask is wanted.
struct NoBits {
  QSIM_HD void push(std::uint32_t, int) {}
  void finish() {}
};

// Elements of a long step. All of a step are loaded before the first result is stored: where y lies a few lines above
// x, not counting whole pages, a load behind the store has the address bits by which processors guess that it must wait
// for that store. An allocator that hands out arrays of whole pages with a header in between puts most outputs there.
constexpr int kStep = 8 * kWidth, kWord = 32;

template <int n, class T, class Rule, class GridOf, class Bits>
QSIM_HD void quantize_step(Rule, const T* x, T* y, const GridOf& grids, Bits& bits) {
  Floats elements[n / kWidth];
  std::uint32_t in_range[n / kWord] = {};
  for (int v = 0; v < n / kWidth; ++v) elements[v] = load(x + v * kWidth);
  for (int v = 0; v < n / kWidth; ++v) {
    const int i = v * kWidth;
    const Quantized<Floats> q = quantize(Rule(), elements[v], grids.after(i));
    elements[v] = q.value;
    in_range[i / kWord] |= bits_in_range(q) << i % kWord;
  }
  for (int v = 0; v < n / kWidth; ++v) store_result(Rule(), y + v * kWidth, elements[v]);
  for (const std::uint32_t word : in_range) bits.push(word, kWord);
}

#if defined(__AVX2__)
// bfloat16 without shuffles: the elements at even places are lower halves of 32-bit words, the others upper ones.
template <int n, class GridOf, class Bits, std::enable_if_t<GridOf::kShared, int> = 0>
QSIM_HD void quantize_step(ByThresholds, const BFloat16* x, BFloat16* y, const GridOf& grids, Bits& bits) {
  constexpr int kPair = 2 * kWidth;
  Words pairs[n / kPair];
  std::uint32_t in_range[n / kWord] = {};
  for (int v = 0; v < n / kPair; ++v) pairs[v] = load_as<Words>(x + v * kPair);
  for (int v = 0; v < n / kPair; ++v) {
    const int i = v * kPair;
    const VectorGrid grid = vectors(grids.after(i));
    const Quantized<Floats> even = ByThresholds::quantize((Floats)(pairs[v] << 16), grid);
    const Quantized<Floats> odd = ByThresholds::quantize((Floats)(pairs[v] & 0xffff0000), grid);
    pairs[v] = round_pairs(even.value, odd.value);
    const std::uint32_t both = _pdep_u32(bits_in_range(even), 0x55555555) | _pdep_u32(bits_in_range(odd), 0xaaaaaaaa);
    in_range[i / kWord] |= both << i % kWord;
  }
  for (int v = 0; v < n / kPair; ++v) store_as(y + v * kPair, pairs[v]);
  for (const std::uint32_t word : in_range) bits.push(word, kWord);
}
#endif

QSIM_INLINE void store_few(const float* values, int n, float* to) {
  for (int j = 0; j < n; ++j) to[j] = values[j];
}
template <class Half>
QSIM_INLINE void store_few(const float* values, int n, Half* to) {
  Half rounded[kWidth];
  store_result(ByContract<Rounding::divide>(), rounded, load(values));
  for (int j = 0; j < n; ++j) to[j] = rounded[j];
}

// Fewer elements than a vector has.
template <class Rule, class T, class GridOf, class Bits>
QSIM_HD void quantize_few(const T* x, T* y, int n, const GridOf& grids, Bits& bits) {
  float values[kWidth] = {};
  std::uint32_t in_range = 0;
  for (int j = 0; j < n; ++j) {
    const Quantized<float> one = Rule::quantize(load_one(x + j), grids[j]);
    values[j] = one.value;
    in_range |= (one.before_clamp == one.after_clamp ? 1u : 0u) << j;
  }
  store_few(values, n, y);
  bits.push(in_range, n);
}

// The last vector overlaps the one before. In place, it must be read before that is written.
template <class Rule, class T, class GridOf, class Bits>
QSIM_HD void quantize_run(const T* x, T* y, std::int64_t n, const GridOf& grids, Bits& to) {
  if (n < kWidth) return quantize_few<Rule>(x, y, static_cast<int>(n), grids, to);
  Bits bits = to;  // in registers
  const int left = static_cast<int>(n % kWidth);
  Quantized<Floats> last;
  if (left != 0) last = quantize(Rule(), load(x + n - kWidth), grids.after(n - kWidth));
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) quantize_step<kStep>(Rule(), x + i, y + i, grids.after(i), bits);
  for (; i + kWord <= n; i += kWord) quantize_step<kWord>(Rule(), x + i, y + i, grids.after(i), bits);
  for (; i + kWidth <= n; i += kWidth) {
    const Quantized<Floats> q = quantize(Rule(), load(x + i), grids.after(i));
    store_result(Rule(), y + i, q.value);
    bits.push(bits_in_range(q), kWidth);
  }
  if (left != 0) {
    store_result(Rule(), y + n - kWidth, last.value);
    bits.push(bits_in_range(last) >> (kWidth - left), left);
  }
  to = bits;
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

// Whole rows of a table, `columns` of them: the grids of a column stay in registers while the rows pass.
template <class T>
QSIM_HD void quantize_columns(const T* x, T* y, std::int64_t rows, std::int64_t width, const Grids<float>& grids) {
  constexpr int kVectors = kVectorBytes == 64 ? 4 : 2;  // of four registers each
  const auto column = [&](std::int64_t at, auto vectors_in_column) {
    constexpr int kCount = decltype(vectors_in_column)::value;
    VectorGrid of[kCount];
    for (int v = 0; v < kCount; ++v) of[v] = vectors(from(grids, at + v * kWidth));
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t i = row * width + at;
      Floats elements[kCount];  // loaded ahead of the stores, as in a step
      for (int v = 0; v < kCount; ++v) elements[v] = load(x + i + v * kWidth);
      for (int v = 0; v < kCount; ++v) elements[v] = ByThresholds::quantize(elements[v], of[v]).value;
      for (int v = 0; v < kCount; ++v) store_result(ByThresholds(), y + i + v * kWidth, elements[v]);
    }
  };
  std::int64_t at = 0;
  for (; at + kVectors * kWidth <= width; at += kVectors * kWidth) column(at, std::integral_constant<int, kVectors>());
  for (; at < width; at += kWidth) column(at, std::integral_constant<int, 1>());
}

// Elements [begin, begin + n) of a segment that starts at `start` and has a grid per column, `grids` from its first.
template <class Rule, class T, class Bits>
void quantize_rows(const T* x, T* y, std::int64_t begin, std::int64_t n, std::int64_t start, const Layout& layout,
                   const Grids<arithmetic_t<T>>& grids, Bits& bits) {
  constexpr std::int64_t kTile = 2048, kFewRows = 4;  // in the cache from one column to the next; worth its loads
  const std::int64_t end = begin + n, width = layout.width;
  while (begin < end) {
    const std::int64_t column = (begin - start) % width;
    if constexpr (std::is_same_v<Rule, ByThresholds> && std::is_same_v<Bits, NoBits>) {
      const std::int64_t rows = std::min((end - begin) / width, std::max(kTile / width, kFewRows));
      if (column == 0 && rows > 1 && width % kWidth == 0) {
        quantize_columns(x + begin, y + begin, rows, width, grids);
        begin += rows * width;
        continue;
      }
    }
    const std::int64_t count = std::min(width - column, end - begin);
    quantize_run<Rule>(x + begin, y + begin, count, from(grids, column), bits);
    begin += count;
  }
}

// Steps of whole blocks, or of parts of one block. Returns how many of the blocks were done.
template <class Rule, class T, class Bits>
std::int64_t quantize_blocks(const T* x, T* y, std::int64_t blocks, std::int64_t size, const Grids<float>& grids,
                             Bits& to) {
  Bits bits = to;  // in registers
  const auto small = [&](auto in_step) {
    constexpr int kBlocks = decltype(in_step)::value;
    for (std::int64_t block = 0; block < blocks; block += kBlocks) {
      const GridPerBlock<kStep / kBlocks> of{offset(grids, block)};
      quantize_step<kStep>(Rule(), x + block * size, y + block * size, of, bits);
    }
  };
  if (size % kStep == 0) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      const OneGrid<float> grid = one(grids, block);
      for (std::int64_t i = block * size; i < (block + 1) * size; i += kStep) {
        quantize_step<kStep>(Rule(), x + i, y + i, grid, bits);
      }
    }
  } else if (kStep == 2 * size) {
    blocks -= blocks % 2;
    small(std::integral_constant<int, 2>());
  } else if (kStep == 4 * size) {
    blocks -= blocks % 4;
    small(std::integral_constant<int, 4>());
  } else {
    blocks = 0;
  }
  to = bits;
  return blocks;
}

template <class Rule, class T, class Bits>
void quantize_range(const T* x, T* y, std::int64_t begin, std::int64_t end, const Grids<arithmetic_t<T>>& grids,
                    const Layout& layout, Bits& bits) {
  if constexpr (std::is_same_v<Rule, ByThresholds>) {
    if (layout.width == 1 && layout.outer % layout.segment == 0 && begin % layout.segment == 0) {
      const std::int64_t blocks = (end - begin) / layout.segment, first = begin / layout.segment;
      begin += layout.segment *
               quantize_blocks<Rule>(x + begin, y + begin, blocks, layout.segment, offset(grids, first), bits);
    }
  }
  for_each_run(
      layout, grids, begin, end,
      [&](std::int64_t at, std::int64_t n, const OneGrid<arithmetic_t<T>>& grid)
          __attribute__((always_inline)) { quantize_run<Rule>(x + at, y + at, n, grid, bits); },
      [&](std::int64_t at, std::int64_t n, std::int64_t start, std::int64_t parameter) {
        quantize_rows<Rule>(x, y, at, n, start, layout, offset(grids, parameter), bits);
      });
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
