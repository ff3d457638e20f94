// binary16 as the compiler rounds it.
#pragma once

#include <bit>

struct __half_raw {
  unsigned short x;
};

struct __half {
  unsigned short bits;
  __half() = default;
  explicit __half(__half_raw raw) : bits(raw.x) {}
};

inline float __half2float(__half x) { return static_cast<float>(std::bit_cast<_Float16>(x.bits)); }
inline __half __float2half_rn(float x) {
  return __half(__half_raw{std::bit_cast<unsigned short>(static_cast<_Float16>(x))});
}
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }
inline __half __hadd(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }

struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
