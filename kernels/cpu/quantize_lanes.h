// Steps of elements on regular grids, as vectors of integers that are packed into 8 and 16 bits.
#pragma once

#include <cstdint>

#include "fake_quantize_rules.h"

namespace qsim::cpu {
namespace {

// Elements whose integers are stored together, in so many vectors of float32.
constexpr int kStep = 32, kVectors = kStep / kWidth;

// Half to even; the least Int for what has no Int, NaN above all.
QSIM_INLINE Ints nearest_integers(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtps_epi32(0xffff, (__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
  return __builtin_convertvector(x >= -0x1p31f ? rounded(x) : all(-0x1p31f), Ints);
#endif
}

// Stores number + first modulo the size of Q, of numbers that fit into Q; 0 + first of negative ones.
#if defined(__AVX512F__)
// Packing takes quarters of the two registers in turn.
QSIM_INLINE void store_packed(const Ints (&numbers)[kVectors], std::uint16_t first, std::uint16_t* to) {
  const __m512i quarters = _mm512_packus_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
  const __m512i packed = _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), quarters);
  store_as(to, _mm512_add_epi16(packed, _mm512_set1_epi16(static_cast<short>(first))));
}
QSIM_INLINE void store_packed(const Ints (&numbers)[kVectors], std::uint8_t first, std::uint8_t* to) {
  const __m512i quarters = _mm512_packus_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
  const __m256i bytes = _mm512_maskz_cvtepi16_epi8(0xffffffff, quarters);
  const __m256i packed = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  store_as(to, _mm256_add_epi8(packed, _mm256_set1_epi8(static_cast<char>(first))));
}
#elif defined(__AVX2__)
// Packing takes halves of the two registers in turn.
QSIM_INLINE void store_packed(const Ints (&numbers)[kVectors], std::uint16_t first, std::uint16_t* to) {
  for (int v = 0; v < kVectors; v += 2) {
    const __m256i halves = _mm256_packus_epi32((__m256i)numbers[v], (__m256i)numbers[v + 1]);
    const __m256i packed = _mm256_permute4x64_epi64(halves, 0b11'01'10'00);
    store_as(to + v * kWidth, _mm256_add_epi16(packed, _mm256_set1_epi16(static_cast<short>(first))));
  }
}
QSIM_INLINE void store_packed(const Ints (&numbers)[kVectors], std::uint8_t first, std::uint8_t* to) {
  const __m256i low = _mm256_packus_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
  const __m256i high = _mm256_packus_epi32((__m256i)numbers[2], (__m256i)numbers[3]);
  const __m256i bytes = _mm256_packus_epi16(low, high);
  const __m256i packed = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  store_as(to, _mm256_add_epi8(packed, _mm256_set1_epi8(static_cast<char>(first))));
}
#else
template <class Q>
QSIM_INLINE void store_packed(const Ints (&numbers)[kVectors], Q first, Q* to) {
  std::int32_t each[kStep];
  std::memcpy(each, numbers, sizeof each);
  for (int i = 0; i < kStep; ++i) to[i] = static_cast<Q>((each[i] > 0 ? each[i] : 0) + first);
}
#endif

QSIM_INLINE Ints lows(const OneGrid<float>& one) { return nearest_integers(all(one.grid.low)); }
QSIM_INLINE Ints lows(const GridPerElement<float>& per_element) {
  return nearest_integers(load(per_element.grids.low));
}

// The grids of kStep elements, in registers if there are enough.
struct StepGrids {
  template <class GridOf>
  explicit QSIM_INLINE StepGrids(const GridOf& grids) {
    for (int v = 0; v < kVectors; ++v) {
      grid[v] = vectors(grids.after(v * kWidth));
      low[v] = lows(grids.after(v * kWidth));
    }
  }

  // Without a lower clamp: what lies below its grid becomes a negative number, NaN and what overflows the least Int,
  // and all of them 0 when they are packed.
  template <class T, class Q>
  QSIM_INLINE void quantize(const T* x, Q* q, Q quant_min) const {
    Ints above[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Floats element = load(x + v * kWidth), highest = grid[v].highest;
      const Floats clamped = highest < element ? highest : element;  // NaN as well
      above[v] = nearest_integers(ByThresholds::quotient(clamped, grid[v])) - low[v];
    }
    store_packed(above, quant_min, q);
  }

  VectorGrid grid[kVectors];
  Ints low[kVectors];
};

}  // namespace
}  // namespace qsim::cpu
