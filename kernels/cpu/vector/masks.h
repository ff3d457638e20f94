// Bit masks in memory, and masks in registers. Bit e % 8 of byte e / 8 belongs to element e. Between a vector loop and
// a bit mask stand flags: integers as wide as the elements (bits_t), -1 or 0.
#pragma once

#include "registers.h"

namespace qsim::cpu {
namespace {

// Bits of the signs of 16 flags.
template <class Flag>
QSIM_INLINE std::uint16_t signs_of_16(const Flag* flags) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= (flags[i] < 0 ? 1u : 0u) << i;
  return static_cast<std::uint16_t>(bits);
}

#if defined(__AVX512DQ__)
QSIM_INLINE std::uint16_t signs_of_16(const std::int32_t* flags) {
  return _mm512_movepi32_mask(_mm512_loadu_si512(flags));
}
#elif defined(__AVX2__)
QSIM_INLINE std::uint16_t signs_of_16(const std::int32_t* flags) {
  const auto half = [&](int i) {
    return _mm256_movemask_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(flags + 8 * i)));
  };
  return static_cast<std::uint16_t>(half(0) | half(1) << 8);
}
#elif defined(__SSE2__)
QSIM_INLINE std::uint16_t signs_of_16(const std::int32_t* flags) {
  const auto quarter = [&](int i) {
    return _mm_movemask_ps(_mm_loadu_ps(reinterpret_cast<const float*>(flags + 4 * i)));
  };
  return static_cast<std::uint16_t>(quarter(0) | quarter(1) << 4 | quarter(2) << 8 | quarter(3) << 12);
}
#endif

template <class Flag>
QSIM_INLINE std::uint32_t signs_of_32(const Flag* flags) {
  return signs_of_16(flags) | static_cast<std::uint32_t>(signs_of_16(flags + 16)) << 16;
}

// Bit j says whether lane j of a equals that of b; NaN equals nothing.
QSIM_INLINE std::uint32_t equal_bits(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
#elif defined(__AVX2__)
  return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)(a == b)));
#elif defined(__SSE2__)
  return static_cast<std::uint32_t>(_mm_movemask_ps((__m128)(a == b)));
#else
  std::uint32_t bits = 0;
  for (int i = 0; i < kFloats; ++i) bits |= (a[i] == b[i] ? 1u : 0u) << i;
  return bits;
#endif
}

// Appends bits to a mask.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* to) : to_(to) {}

  // The lowest n <= 32 bits; higher ones are 0.
  QSIM_INLINE void push(std::uint32_t bits, int n) {
    pending_ |= static_cast<std::uint64_t>(bits) << count_;
    count_ += n;
    if (count_ < 32) return;
    std::memcpy(to_, &pending_, 4);
    to_ += 4;
    pending_ >>= 32;
    count_ -= 32;
  }

  void finish() {
    if (count_ > 0) std::memcpy(to_, &pending_, static_cast<std::size_t>((count_ + 7) / 8));
  }

 private:
  std::uint8_t* to_;
  std::uint64_t pending_ = 0;
  int count_ = 0;
};

// to = from where the mask is set, +0.0 elsewhere: bits that were not computed with.
QSIM_INLINE void store_where(mask_t<float> mask, const float* from, float* to) {
  store_as(to, load_as<mask_t<float>>(from) & mask);
}
QSIM_INLINE void store_where(mask_t<double> mask, const double* from, double* to) {
  store_as(to, load_as<mask_t<double>>(from) & mask);
}
template <class Half>
QSIM_INLINE void store_where(mask_t<float> mask, const Half* from, Half* to) {
  store_as(to, (Shorts)(load_as<Shorts>(from) & narrow((Words)mask >> 16)));
}

}  // namespace
}  // namespace qsim::cpu
