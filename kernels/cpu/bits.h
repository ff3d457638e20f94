// Bit masks: bit e % 8 of byte e / 8 belongs to element e. Between a vector loop and a mask stand flags: integers as
// wide as the elements, -1 or 0.
#pragma once

#include <cstdint>
#include <cstring>

#include "float_vector.h"
#include "qsim/portability.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace qsim::cpu {
namespace {

template <class A>
struct FlagOf;
template <>
struct FlagOf<float> {
  using type = std::int32_t;
};
template <>
struct FlagOf<double> {
  using type = std::int64_t;
};
template <class A>
using flag_t = typename FlagOf<A>::type;

// Bits of the signs of 16 flags.
template <class Flag>
QSIM_HD std::uint16_t signs_of_16(const Flag* flags) {
  unsigned bits = 0;
  for (int i = 0; i < 16; ++i) bits |= (flags[i] < 0 ? 1u : 0u) << i;
  return static_cast<std::uint16_t>(bits);
}

#if defined(__AVX512DQ__)
QSIM_HD std::uint16_t signs_of_16(const std::int32_t* flags) { return _mm512_movepi32_mask(_mm512_loadu_si512(flags)); }
#elif defined(__AVX2__)
QSIM_HD std::uint16_t signs_of_16(const std::int32_t* flags) {
  const auto half = [&](int i) {
    return _mm256_movemask_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(flags + 8 * i)));
  };
  return static_cast<std::uint16_t>(half(0) | half(1) << 8);
}
#elif defined(__SSE2__)
QSIM_HD std::uint16_t signs_of_16(const std::int32_t* flags) {
  const auto quarter = [&](int i) {
    return _mm_movemask_ps(_mm_loadu_ps(reinterpret_cast<const float*>(flags + 4 * i)));
  };
  return static_cast<std::uint16_t>(quarter(0) | quarter(1) << 4 | quarter(2) << 8 | quarter(3) << 12);
}
#endif

template <class Flag>
QSIM_HD std::uint32_t signs_of_32(const Flag* flags) {
  return signs_of_16(flags) | static_cast<std::uint32_t>(signs_of_16(flags + 16)) << 16;
}

// Bit j says whether lane j of a equals that of b; NaN equals nothing.
QSIM_HD std::uint32_t equal_bits(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ);
#elif defined(__AVX2__)
  return static_cast<std::uint32_t>(_mm256_movemask_ps((__m256)(a == b)));
#elif defined(__SSE2__)
  return static_cast<std::uint32_t>(_mm_movemask_ps((__m128)(a == b)));
#else
  std::uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= (a[i] == b[i] ? 1u : 0u) << i;
  return bits;
#endif
}

// Appends bits to a mask.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* to) : to_(to) {}

  // The lowest n <= 32 bits; higher ones are 0.
  QSIM_HD void push(std::uint32_t bits, int n) {
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

// dx = grad where the bit is set, +0.0 elsewhere. U is as wide as an element: only bits are moved. begin is a multiple
// of 8.
template <class U>
void keep_where_set(const U* grad, const std::uint8_t* mask, U* dx, std::int64_t begin, std::int64_t end) {
  constexpr int kRoom = 16 * int{sizeof(U)};  // at most 16 lanes: an element has room for its bit
  constexpr int kBytes = kVectorBytes < kRoom ? kVectorBytes : kRoom;
  constexpr int kLanes = kBytes / int{sizeof(U)}, kStep = kLanes < 8 ? 8 : kLanes;
  typedef U Vector __attribute__((vector_size(kBytes)));
  Vector bit[kStep / kLanes];
  for (int j = 0; j < kStep; ++j) bit[j / kLanes][j % kLanes] = static_cast<U>(1u << j);
  std::int64_t i = begin;
  for (; i + kStep <= end; i += kStep) {
    std::uint16_t word = 0;
    std::memcpy(&word, mask + i / 8, kStep / 8);
    const Vector words = Vector{} + static_cast<U>(word);
    for (int part = 0; part < kStep / kLanes; ++part) {
      Vector values;
      std::memcpy(&values, grad + i + part * kLanes, kBytes);
      values &= reinterpret_cast<Vector>((words & bit[part]) == bit[part]);
      std::memcpy(dx + i + part * kLanes, &values, kBytes);
    }
  }
  for (; i < end; ++i) dx[i] = mask[i / 8] >> i % 8 & 1 ? grad[i] : U(0);
}

}  // namespace
}  // namespace qsim::cpu
