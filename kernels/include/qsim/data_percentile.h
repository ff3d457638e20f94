// Order statistics of the finite values of an array, by radix selection: no copy, no order of the input that is slow.
#pragma once

#include "qsim/search_range.h"

namespace qsim {

QSIM_HD std::uint64_t order_key(float x) {  // ascending as the values are; -0 before +0
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
QSIM_HD std::uint64_t order_key(double x) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}
QSIM_HD float value_of(std::uint64_t key, float) {
  const auto wanted = static_cast<std::uint32_t>(key);
  const std::uint32_t bits = wanted ^ (wanted >> 31 ? 0x80000000u : 0xffffffffu);
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
QSIM_HD double value_of(std::uint64_t key, double) {
  const std::uint64_t bits = key ^ (key >> 63 ? 1ull << 63 : ~0ull);
  double x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// The finite value that has `rank` finite ones before it in ascending order; there are more than `rank`.
template <class T>
QSIM_HD T value_at_rank(const T* x, std::int64_t n, std::int64_t rank) {
  constexpr int kBits = 8 * sizeof(T);
  std::uint64_t found = 0;  // the leading digits of the value's key
  for (int shift = kBits - 8; shift >= 0; shift -= 8) {
    std::int64_t counts[256] = {};
    for (std::int64_t i = 0; i < n; ++i) {
      if (!(x[i] >= -largest(T{}) && x[i] <= largest(T{}))) continue;
      const std::uint64_t key = order_key(x[i]) >> shift;
      if (key >> 8 == found) ++counts[key & 255];
    }
    int digit = 0;
    for (; rank >= counts[digit]; ++digit) rank -= counts[digit];
    found = found << 8 | static_cast<std::uint64_t>(digit);
  }
  return value_of(found, T{});
}

// Linear between the two values around `position` = 0 .. finite - 1.
template <class T>
QSIM_HD double value_at_position(const T* x, std::int64_t n, std::int64_t finite, double position) {
  const auto rank = static_cast<std::int64_t>(position);
  const double below = value_at_rank(x, n, rank), part = position - static_cast<double>(rank);
  if (part == 0 || rank + 1 >= finite) return below;
  return below + (value_at_rank(x, n, rank + 1) - below) * part;
}

template <class T>
QSIM_HD Range data_percentile(const T* x, std::int64_t n, std::int64_t finite, double percentile) {
  const auto last = static_cast<double>(finite - 1);
  const double dropped = last * ((100 - percentile) / 200);
  return {value_at_position(x, n, finite, dropped), value_at_position(x, n, finite, last - dropped)};
}

}  // namespace qsim
