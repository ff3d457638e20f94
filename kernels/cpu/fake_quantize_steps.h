// Runs of elements that share a grid or have one each, in steps of whole vectors, with or without a mask.
#pragma once

#include <algorithm>
#include <type_traits>

#include "bits.h"
#include "fake_quantize_rules.h"
#include "half_tiles.h"

namespace qsim::cpu {
namespace {

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

}  // namespace
}  // namespace qsim::cpu
