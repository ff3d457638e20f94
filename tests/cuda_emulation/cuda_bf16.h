// bfloat16: the upper half of a float32, rounded to nearest even.
#pragma once

#include <bit>

struct __nv_bfloat16 {
  unsigned short bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline float __bfloat162float(__nv_bfloat16 x) { return std::bit_cast<float>(static_cast<unsigned>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const unsigned bits = std::bit_cast<unsigned>(x);
  if (x != x) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
