// Shapes for which steps over one run after the other would cost too much: rows with a grid per column, and runs of a
// few vectors each.
#pragma once

#include "fake_quantize_steps.h"

namespace qsim::cpu {
namespace {

// Neighbours in a few rows of a table with a grid per column. grid_of(v): that of column vector v.
template <int rows, int count>
struct Patch {
  Floats elements[rows][count];

  template <class T, class GridOf>
  QSIM_INLINE void quantize(const T* x, std::int64_t width, GridOf grid_of) {
    for (int row = 0; row < rows; ++row) {
      for (int v = 0; v < count; ++v) elements[row][v] = load(x + row * width + v * kWidth);
    }
    for (int v = 0; v < count; ++v) {
      const VectorGrid grid = grid_of(v);
      for (auto& row : elements) row[v] = ByThresholds::quantize(row[v], grid).value;
    }
  }
  template <class T>
  QSIM_INLINE void store(T* y, std::int64_t width) const {
    for (int row = 0; row < rows; ++row) {
      for (int v = 0; v < count; ++v) store_result(ByThresholds(), y + row * width + v * kWidth, elements[row][v]);
    }
  }
};

template <int rows, int count, class T, class GridOf>
QSIM_INLINE void quantize_patch(const T* x, T* y, std::int64_t width, GridOf grid_of) {
  Patch<rows, count> patch;
  patch.quantize(x, width, grid_of);
  patch.store(y, width);
}

constexpr int kRows = 4;                              // that share a load of their grids
constexpr int kColumns = kVectorBytes == 64 ? 2 : 1;  // vectors of them: more would not leave enough registers

// kRows rows. The last vector of a row overlaps the one before, as in a run.
template <class T>
void quantize_few_rows(const T* x, T* y, std::int64_t width, const Grids<float>& grids) {
  const auto from_column = [&](std::int64_t i) {
    return [&grids, i](int v) { return vectors(from(grids, i + v * kWidth)); };
  };
  Patch<kRows, 1> last{};
  if (width % kWidth != 0) last.quantize(x + width - kWidth, width, from_column(width - kWidth));
  std::int64_t i = 0;
  for (; i + kColumns * kWidth <= width; i += kColumns * kWidth) {
    quantize_patch<kRows, kColumns>(x + i, y + i, width, from_column(i));
  }
  for (; i + kWidth <= width; i += kWidth) quantize_patch<kRows, 1>(x + i, y + i, width, from_column(i));
  if (i != width) last.store(y + width - kWidth, width);
}

// Strips of columns whose grids stay in registers while the rows of a tile pass, for which AVX-512 has enough of them:
// best for short rows. Returns how many elements were done.
template <class T>
std::int64_t quantize_strips(const T* x, T* y, std::int64_t n, std::int64_t width, const Grids<float>& grids) {
  constexpr int kStrip = 4, kLongestRow = 256, kTile = 2048;  // a tile stays in the cache from one strip to the next
  if (width % (kStrip * kWidth) != 0 || width > kLongestRow) return 0;
  std::int64_t done = 0;
  while (done + width <= n) {
    const std::int64_t rows = std::min(n - done, std::int64_t{kTile}) / width, end = done + rows * width;
    for (std::int64_t column = 0; column < width; column += kStrip * kWidth) {
      VectorGrid of[kStrip];
      for (int v = 0; v < kStrip; ++v) of[v] = vectors(from(grids, column + v * kWidth));
      for (std::int64_t i = done + column; i < end; i += width) {
        quantize_patch<1, kStrip>(x + i, y + i, width, [&](int v) { return of[v]; });
      }
    }
    done = end;
  }
  return done;
}

// The whole rows among n elements that begin with one, but for those that are not a group of kRows. Returns how many
// elements that were.
template <class T>
std::int64_t quantize_whole_rows(const T* x, T* y, std::int64_t n, std::int64_t width, const Grids<float>& grids) {
  std::int64_t i = kVectorBytes == 64 ? quantize_strips(x, y, n, width, grids) : 0;
  for (; i + kRows * width <= n; i += kRows * width) quantize_few_rows(x + i, y + i, width, grids);
  return i;
}

// Elements [begin, begin + n) of a segment that starts at `start` and has a grid per column, `grids` from its first.
template <class Rule, class T, class Bits>
void quantize_rows(const T* x, T* y, std::int64_t begin, std::int64_t n, std::int64_t start, const Layout& layout,
                   const Grids<arithmetic_t<T>>& grids, Bits& bits) {
  const std::int64_t end = begin + n, width = layout.width;
  for (std::int64_t column = (begin - start) % width; begin < end; column = 0) {
    if constexpr (std::is_same_v<Rule, ByThresholds> && std::is_same_v<Bits, NoBits>) {
      if (column == 0 && width >= kWidth) {
        begin += quantize_whole_rows(x + begin, y + begin, end - begin, width, grids);
        if (begin == end) return;
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

constexpr bool kLastFirst = kVectorBytes == 64;  // read the last vector before the steps: they leave registers

// Runs of n elements and a grid each, one after the other. What is left of a run beyond steps takes `rest` vectors and,
// as in quantize_run, one that overlaps the one before: all runs have the same shape, which is worth a loop per shape
// where they are short.
template <int rest, class T, class Bits>
void quantize_equal_runs(const T* x, T* y, std::int64_t runs, std::int64_t n, const Grids<float>& grids, Bits& to) {
  Bits bits = to;  // in registers
  const int left = static_cast<int>(n % kWidth);
  constexpr int kBits = rest * kWidth, kWords = kBits / kWord;
  const std::int64_t steps = n - left - kBits;
  for (std::int64_t run = 0; run < runs; ++run, x += n, y += n) {
    const OneGrid<float> grid = one(grids, run);
    Floats others[rest + 1], last;
    std::uint32_t in_range[kWords + 1] = {};
    const auto load_last = [&] { return left != 0 ? load(x + n - kWidth) : Floats{}; };
    if (kLastFirst || rest == 0) last = load_last();
    for (std::int64_t i = 0; i < steps; i += kStep) quantize_step<kStep>(ByThresholds(), x + i, y + i, grid, bits);
    if (!kLastFirst && rest != 0) last = load_last();
    for (int v = 0; v < rest; ++v) others[v] = load(x + steps + v * kWidth);
    for (int v = 0; v < rest; ++v) {
      const Quantized<Floats> q = quantize(ByThresholds(), others[v], grid);
      others[v] = q.value;
      in_range[v * kWidth / kWord] |= bits_in_range(q) << v * kWidth % kWord;
    }
    for (int v = 0; v < rest; ++v) store_result(ByThresholds(), y + steps + v * kWidth, others[v]);
    if (left != 0) {
      const Quantized<Floats> q = quantize(ByThresholds(), last, grid);
      store_result(ByThresholds(), y + n - kWidth, q.value);
      in_range[kWords] |= bits_in_range(q) >> (kWidth - left) << kBits % kWord;
    }
    for (int word = 0; word < kWords; ++word) bits.push(in_range[word], kWord);
    bits.push(in_range[kWords], kBits % kWord + left);
  }
  to = bits;
}

template <int rest = kStep / kWidth - 1, class T, class Bits>
void quantize_runs(const T* x, T* y, std::int64_t runs, std::int64_t n, const Grids<float>& grids, Bits& bits) {
  if constexpr (rest > 0) {
    if (n / kWidth % (kStep / kWidth) != rest) return quantize_runs<rest - 1>(x, y, runs, n, grids, bits);
  }
  quantize_equal_runs<rest>(x, y, runs, n, grids, bits);
}

}  // namespace
}  // namespace qsim::cpu
