// Rows with a grid per column, as channels_last has them: one row after the other would load its grids anew. Called by
// forward.cpp. y may be x.
#pragma once

#include "fake_quantize/run.h"

namespace qsim::cpu {
namespace {

// Neighbours in a few rows of a table with a grid per column. grid_of(v): those of column register v.
template <int rows, int count>
struct Patch {
  Floats elements[rows][count];

  template <class T, class GridOf>
  QSIM_INLINE void quantize(const T* x, std::int64_t width, GridOf grid_of) {
    for (int row = 0; row < rows; ++row) {
      for (int v = 0; v < count; ++v) elements[row][v] = load(x + row * width + v * kFloats);
    }
    for (int v = 0; v < count; ++v) {
      const RegisterGrid grid = grid_of(v);
      for (auto& row : elements) row[v] = ByThresholds::quantize(row[v], grid).value;
    }
  }
  template <class T>
  QSIM_INLINE void store(T* y, std::int64_t width) const {
    for (int row = 0; row < rows; ++row) {
      for (int v = 0; v < count; ++v) store_quantized(ByThresholds(), y + row * width + v * kFloats, elements[row][v]);
    }
  }
};

template <int rows, int count, class T, class GridOf>
QSIM_INLINE void quantize_patch(const T* x, T* y, std::int64_t width, GridOf grid_of) {
  Patch<rows, count> patch;
  patch.quantize(x, width, grid_of);
  patch.store(y, width);
}

constexpr int kPatchRows = 4;                                // that share a load of their grids
constexpr int kPatchColumns = kRegisterBytes == 64 ? 2 : 1;  // registers of columns: more would not leave enough

// kPatchRows rows. The last register of a row overlaps the one before, as in a run.
template <class T>
void quantize_few_rows(const T* x, T* y, std::int64_t width, const Grids<float>& grids) {
  const auto from_column = [&](std::int64_t i) {
    return [&grids, i](int v) { return in_registers(grids_from(grids, i + v * kFloats)); };
  };
  Patch<kPatchRows, 1> last{};
  if (width % kFloats != 0) last.quantize(x + width - kFloats, width, from_column(width - kFloats));
  std::int64_t i = 0;
  for (; i + kPatchColumns * kFloats <= width; i += kPatchColumns * kFloats) {
    quantize_patch<kPatchRows, kPatchColumns>(x + i, y + i, width, from_column(i));
  }
  for (; i + kFloats <= width; i += kFloats) quantize_patch<kPatchRows, 1>(x + i, y + i, width, from_column(i));
  if (i != width) last.store(y + width - kFloats, width);
}

// Strips of columns whose grids stay in registers while the rows of a tile pass, for which AVX-512 has enough of them:
// best for short rows. Returns how many elements were done.
template <class T>
std::int64_t quantize_strips(const T* x, T* y, std::int64_t n, std::int64_t width, const Grids<float>& grids) {
  constexpr int kStrip = 4, kLongestRow = 256, kTile = 2048;  // a tile stays in the cache from one strip to the next
  if (width % (kStrip * kFloats) != 0 || width > kLongestRow) return 0;
  std::int64_t done = 0;
  while (done + width <= n) {
    const std::int64_t rows = std::min(n - done, std::int64_t{kTile}) / width, end = done + rows * width;
    for (std::int64_t column = 0; column < width; column += kStrip * kFloats) {
      RegisterGrid of[kStrip];
      for (int v = 0; v < kStrip; ++v) of[v] = in_registers(grids_from(grids, column + v * kFloats));
      for (std::int64_t i = done + column; i < end; i += width) {
        quantize_patch<1, kStrip>(x + i, y + i, width, [&](int v) { return of[v]; });
      }
    }
    done = end;
  }
  return done;
}

// The whole rows among n elements that begin with one, but for those that are not a group of kPatchRows. Returns how
// many elements that were.
template <class T>
std::int64_t quantize_whole_rows(const T* x, T* y, std::int64_t n, std::int64_t width, const Grids<float>& grids) {
  std::int64_t i = kRegisterBytes == 64 ? quantize_strips(x, y, n, width, grids) : 0;
  for (; i + kPatchRows * width <= n; i += kPatchRows * width) quantize_few_rows(x + i, y + i, width, grids);
  return i;
}

// Elements [begin, begin + n) of a segment that starts at `start` and has a grid per column, `grids` from its first.
template <class Rule, class T, class Bits>
void quantize_rows(const T* x, T* y, std::int64_t begin, std::int64_t n, std::int64_t start, const Layout& layout,
                   const Grids<arithmetic_t<T>>& grids, Bits& bits) {
  const std::int64_t end = begin + n, width = layout.width;
  for (std::int64_t column = (begin - start) % width; begin < end; column = 0) {
    if constexpr (std::is_same_v<Rule, ByThresholds> && std::is_same_v<Bits, NoBits>) {
      if (column == 0 && width >= kFloats) {
        begin += quantize_whole_rows(x + begin, y + begin, end - begin, width, grids);
        if (begin == end) return;
      }
    }
    const std::int64_t count = std::min(width - column, end - begin);
    quantize_run<Rule>(x + begin, y + begin, count, grids_from(grids, column), bits);
    begin += count;
  }
}

}  // namespace
}  // namespace qsim::cpu
