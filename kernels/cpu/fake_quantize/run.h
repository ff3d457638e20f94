// Runs: neighbours that share a grid, or have one each, quantized in chunks of registers, with or without a mask.
// Called by forward.cpp, and by rows.h for what is left of rows. y may be x.
#pragma once

#include <algorithm>
#include <type_traits>

#include "fake_quantize/grids.h"
#include "vector/masks.h"

namespace qsim::cpu {
namespace {

template <class Rule>
QSIM_INLINE void store_quantized(Rule, float* to, Floats y) {
  store(to, y);
}
template <class Rule, class Half>
QSIM_INLINE void store_quantized(Rule, Half* to, Floats y) {
  round_to(to, y);
  drop_sign_of_zero(to);
}
QSIM_INLINE void store_quantized(ByThresholds, BFloat16* to, Floats y) {
  round_to(to, y);
}  // scales are 2^-100 at least

QSIM_INLINE std::uint32_t bits_in_range(const Quantized<Floats>& q) {
  return equal_bits(q.before_clamp, q.after_clamp);
}

// Writers of masks, and what takes their place when no mask is wanted.
struct NoBits {
  QSIM_INLINE void push(std::uint32_t, int) {}
  void finish() {}
};

// Elements of a long chunk. All of a chunk are loaded before the first result is stored: where y lies a few lines above
// x, not counting whole pages, a load behind the store has the address bits by which processors guess that it must wait
// for that store. An allocator that hands out arrays of whole pages with a header in between puts most outputs there.
constexpr int kChunk = 8 * kFloats, kWord = 32;

template <int n, class T, class Rule, class GridOf, class Bits>
QSIM_INLINE void quantize_chunk(Rule, const T* x, T* y, const GridOf& grids, Bits& bits) {
  Floats elements[n / kFloats];
  std::uint32_t in_range[n / kWord] = {};
  for (int v = 0; v < n / kFloats; ++v) elements[v] = load(x + v * kFloats);
  for (int v = 0; v < n / kFloats; ++v) {
    const int i = v * kFloats;
    const Quantized<Floats> q = quantize(Rule(), elements[v], grids.after(i));
    elements[v] = q.value;
    in_range[i / kWord] |= bits_in_range(q) << i % kWord;
  }
  for (int v = 0; v < n / kFloats; ++v) store_quantized(Rule(), y + v * kFloats, elements[v]);
  for (const std::uint32_t word : in_range) bits.push(word, kWord);
}

#if defined(__AVX2__)
// bfloat16 without shuffles: the elements at even places are lower halves of 32-bit words, the others upper ones.
template <int n, class GridOf, class Bits, std::enable_if_t<GridOf::kShared, int> = 0>
QSIM_INLINE void quantize_chunk(ByThresholds, const BFloat16* x, BFloat16* y, const GridOf& grids, Bits& bits) {
  constexpr int kPair = 2 * kFloats;
  Words pairs[n / kPair];
  std::uint32_t in_range[n / kWord] = {};
  for (int v = 0; v < n / kPair; ++v) pairs[v] = load_as<Words>(x + v * kPair);
  for (int v = 0; v < n / kPair; ++v) {
    const int i = v * kPair;
    const RegisterGrid grid = in_registers(grids.after(i));
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
  Half rounded[kFloats];
  store_quantized(ByContract<Rounding::divide>(), rounded, load(values));
  for (int j = 0; j < n; ++j) to[j] = rounded[j];
}

// Fewer elements than a register has.
template <class Rule, class T, class GridOf, class Bits>
QSIM_INLINE void quantize_few(const T* x, T* y, int n, const GridOf& grids, Bits& bits) {
  float values[kFloats] = {};
  std::uint32_t in_range = 0;
  for (int j = 0; j < n; ++j) {
    const Quantized<float> one = Rule::quantize(load_one(x + j), grids[j]);
    values[j] = one.value;
    in_range |= (one.before_clamp == one.after_clamp ? 1u : 0u) << j;
  }
  store_few(values, n, y);
  bits.push(in_range, n);
}

// The last register overlaps the one before. In place, it must be read before that is written.
template <class Rule, class T, class GridOf, class Bits>
QSIM_INLINE void quantize_run(const T* x, T* y, std::int64_t n, const GridOf& grids, Bits& to) {
  if (n < kFloats) return quantize_few<Rule>(x, y, static_cast<int>(n), grids, to);
  Bits bits = to;  // in registers
  const int left = static_cast<int>(n % kFloats);
  Quantized<Floats> last;
  if (left != 0) last = quantize(Rule(), load(x + n - kFloats), grids.after(n - kFloats));
  std::int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) quantize_chunk<kChunk>(Rule(), x + i, y + i, grids.after(i), bits);
  for (; i + kWord <= n; i += kWord) quantize_chunk<kWord>(Rule(), x + i, y + i, grids.after(i), bits);
  for (; i + kFloats <= n; i += kFloats) {
    const Quantized<Floats> q = quantize(Rule(), load(x + i), grids.after(i));
    store_quantized(Rule(), y + i, q.value);
    bits.push(bits_in_range(q), kFloats);
  }
  if (left != 0) {
    store_quantized(Rule(), y + n - kFloats, last.value);
    bits.push(bits_in_range(last) >> (kFloats - left), left);
  }
  to = bits;
}

template <class Rule, class GridOf>
QSIM_INLINE void quantize_run(const double* x, double* y, std::int64_t n, GridOf grids, NoBits&) {
  QSIM_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) y[i] = Rule::quantize(x[i], grids[i]).value;
}

template <class Rule, class GridOf>
QSIM_INLINE void quantize_run(const double* x, double* y, std::int64_t n, GridOf grids, BitWriter& bits) {
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

// Below: many runs of one length with a grid each, often a few registers long (blocks of 32, images of 7x7), for which
// what quantize_run does once for each would cost too much. Regular grids only.

// Chunks of whole blocks, or of parts of one block. Returns how many of the blocks were done.
template <class Rule, class T, class Bits>
std::int64_t quantize_blocks(const T* x, T* y, std::int64_t blocks, std::int64_t size, const Grids<float>& grids,
                             Bits& to) {
  Bits bits = to;  // in registers
  const auto small = [&](auto in_chunk) {
    constexpr int kBlocks = decltype(in_chunk)::value;
    for (std::int64_t block = 0; block < blocks; block += kBlocks) {
      const GridPerBlock<kChunk / kBlocks> of{offset(grids, block)};
      quantize_chunk<kChunk>(Rule(), x + block * size, y + block * size, of, bits);
    }
  };
  if (size % kChunk == 0) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      const OneGrid<float> grid = shared_grid(grids, block);
      for (std::int64_t i = block * size; i < (block + 1) * size; i += kChunk) {
        quantize_chunk<kChunk>(Rule(), x + i, y + i, grid, bits);
      }
    }
  } else if (kChunk == 2 * size) {
    blocks -= blocks % 2;
    small(std::integral_constant<int, 2>());
  } else if (kChunk == 4 * size) {
    blocks -= blocks % 4;
    small(std::integral_constant<int, 4>());
  } else {
    blocks = 0;
  }
  to = bits;
  return blocks;
}

constexpr bool kLastFirst = kRegisterBytes == 64;  // before the chunks: they leave a register for it

// Runs of n elements and a grid each, one after the other. What is left of a run beyond chunks takes `rest` registers
// and, as in quantize_run, one that overlaps the one before: all runs have the same shape, which is worth a loop per
// shape where they are short.
template <int rest, class T, class Bits>
void quantize_equal_runs(const T* x, T* y, std::int64_t runs, std::int64_t n, const Grids<float>& grids, Bits& to) {
  Bits bits = to;  // in registers
  const int left = static_cast<int>(n % kFloats);
  constexpr int kBits = rest * kFloats, kWords = kBits / kWord;
  const std::int64_t chunks = n - left - kBits;  // elements
  for (std::int64_t run = 0; run < runs; ++run, x += n, y += n) {
    const OneGrid<float> grid = shared_grid(grids, run);
    Floats others[rest + 1], last;
    std::uint32_t in_range[kWords + 1] = {};
    const auto load_last = [&] { return left != 0 ? load(x + n - kFloats) : Floats{}; };
    if (kLastFirst || rest == 0) last = load_last();
    for (std::int64_t i = 0; i < chunks; i += kChunk) quantize_chunk<kChunk>(ByThresholds(), x + i, y + i, grid, bits);
    if (!kLastFirst && rest != 0) last = load_last();
    for (int v = 0; v < rest; ++v) others[v] = load(x + chunks + v * kFloats);
    for (int v = 0; v < rest; ++v) {
      const Quantized<Floats> q = quantize(ByThresholds(), others[v], grid);
      others[v] = q.value;
      in_range[v * kFloats / kWord] |= bits_in_range(q) << v * kFloats % kWord;
    }
    for (int v = 0; v < rest; ++v) store_quantized(ByThresholds(), y + chunks + v * kFloats, others[v]);
    if (left != 0) {
      const Quantized<Floats> q = quantize(ByThresholds(), last, grid);
      store_quantized(ByThresholds(), y + n - kFloats, q.value);
      in_range[kWords] |= bits_in_range(q) >> (kFloats - left) << kBits % kWord;
    }
    for (int word = 0; word < kWords; ++word) bits.push(in_range[word], kWord);
    bits.push(in_range[kWords], kBits % kWord + left);
  }
  to = bits;
}

template <int rest = kChunk / kFloats - 1, class T, class Bits>
void quantize_runs(const T* x, T* y, std::int64_t runs, std::int64_t n, const Grids<float>& grids, Bits& bits) {
  if constexpr (rest > 0) {
    if (n / kFloats % (kChunk / kFloats) != rest) return quantize_runs<rest - 1>(x, y, runs, n, grids, bits);
  }
  quantize_equal_runs<rest>(x, y, runs, n, grids, bits);
}

}  // namespace
}  // namespace qsim::cpu
