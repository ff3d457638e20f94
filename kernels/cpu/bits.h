// Bit masks: bit e % 8 of byte e / 8 belongs to element e.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace qsim::cpu {
namespace {

// Bit i of the result is the top bit of flags[i], for 64 flags.
inline std::uint64_t pack_64(const std::uint8_t* flags) {
#if defined(__AVX512BW__)
  return _mm512_movepi8_mask(_mm512_loadu_si512(flags));
#elif defined(__AVX2__)
  const auto half = [&](int i) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags + 32 * i));
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes)));
  };
  return half(0) | half(1) << 32;
#elif defined(__SSE2__)
  const auto quarter = [&](int i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + 16 * i));
    return static_cast<std::uint64_t>(_mm_movemask_epi8(bytes)) << 16 * i;
  };
  return quarter(0) | quarter(1) | quarter(2) | quarter(3);
#else
  std::uint64_t bits = 0;
  for (int i = 0; i < 64; ++i) bits |= static_cast<std::uint64_t>(flags[i] >> 7) << i;
  return bits;
#endif
}

// Packs n flags of 0 or 0xff; `flags` has room for the next multiple of 64.
inline void pack_bits(std::uint8_t* flags, std::int64_t n, std::uint8_t* bits) {
  std::int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const std::uint64_t word = pack_64(flags + i);
    std::memcpy(bits + i / 8, &word, 8);
  }
  if (i < n) {
    std::memset(flags + n, 0, static_cast<std::size_t>(i + 64 - n));
    const std::uint64_t word = pack_64(flags + i);
    std::memcpy(bits + i / 8, &word, static_cast<std::size_t>((n - i + 7) / 8));
  }
}

}  // namespace
}  // namespace qsim::cpu
