// Registers of integers packed into 8 and 16 bits. Used by quantize.cpp.
#pragma once

#include "registers.h"

namespace qsim::cpu {
namespace {

// Integers that are stored together, and the registers that hold them.
constexpr int kPacked = 32, kPackedRegisters = kPacked / kFloats;

// Stores number + first modulo the size of Q, of numbers that fit into Q; 0 + first of negative ones.
#if defined(__AVX512F__)
// Packing takes quarters of the two registers in turn.
QSIM_INLINE void store_packed(const Ints (&numbers)[kPackedRegisters], std::uint16_t first, std::uint16_t* to) {
  const __m512i quarters = _mm512_packus_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
  const __m512i packed = _mm512_maskz_permutexvar_epi64(0xff, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), quarters);
  store_as(to, _mm512_add_epi16(packed, _mm512_set1_epi16(static_cast<short>(first))));
}
QSIM_INLINE void store_packed(const Ints (&numbers)[kPackedRegisters], std::uint8_t first, std::uint8_t* to) {
  const __m512i quarters = _mm512_packus_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
  const __m256i bytes = _mm512_maskz_cvtepi16_epi8(0xffffffff, quarters);
  const __m256i packed = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  store_as(to, _mm256_add_epi8(packed, _mm256_set1_epi8(static_cast<char>(first))));
}
#elif defined(__AVX2__)
// Packing takes halves of the two registers in turn.
QSIM_INLINE void store_packed(const Ints (&numbers)[kPackedRegisters], std::uint16_t first, std::uint16_t* to) {
  for (int v = 0; v < kPackedRegisters; v += 2) {
    const __m256i halves = _mm256_packus_epi32((__m256i)numbers[v], (__m256i)numbers[v + 1]);
    const __m256i packed = _mm256_permute4x64_epi64(halves, 0b11'01'10'00);
    store_as(to + v * kFloats, _mm256_add_epi16(packed, _mm256_set1_epi16(static_cast<short>(first))));
  }
}
QSIM_INLINE void store_packed(const Ints (&numbers)[kPackedRegisters], std::uint8_t first, std::uint8_t* to) {
  const __m256i low = _mm256_packus_epi32((__m256i)numbers[0], (__m256i)numbers[1]);
  const __m256i high = _mm256_packus_epi32((__m256i)numbers[2], (__m256i)numbers[3]);
  const __m256i bytes = _mm256_packus_epi16(low, high);
  const __m256i packed = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  store_as(to, _mm256_add_epi8(packed, _mm256_set1_epi8(static_cast<char>(first))));
}
#else
template <class Q>
QSIM_INLINE void store_packed(const Ints (&numbers)[kPackedRegisters], Q first, Q* to) {
  std::int32_t each[kPacked];
  std::memcpy(each, numbers, sizeof each);
  for (int i = 0; i < kPacked; ++i) to[i] = static_cast<Q>((each[i] > 0 ? each[i] : 0) + first);
}
#endif

}  // namespace
}  // namespace qsim::cpu
