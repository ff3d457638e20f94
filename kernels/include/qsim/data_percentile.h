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

// Radix selection of the value that has `rank` finite ones before it in ascending order, digit by digit:
// count_digits(counts, found, shift) counts, in bits [shift, shift + 8) of their keys, the finite values whose keys
// begin with the digits found so far.
template <class T, class CountDigits>
QSIM_HD T value_at_rank(std::int64_t rank, std::int64_t* counts, CountDigits count_digits) {
  std::uint64_t found = 0;
  for (int shift = 8 * sizeof(T) - 8; shift >= 0; shift -= 8) {
    count_digits(counts, found, shift);
    std::int64_t before = rank;
    int digit = 0;
    for (; before >= counts[digit]; ++digit) before -= counts[digit];
    rank = before;
    found = found << 8 | static_cast<std::uint64_t>(digit);
  }
  return value_of(found, T{});
}

// Linear between the two values around `position` = 0 .. finite - 1, as torch.quantile.
template <class ValueAtRank>
QSIM_HD double value_at_position(std::int64_t finite, double position, ValueAtRank value_at) {
  const auto rank = static_cast<std::int64_t>(position);
  const double below = value_at(rank), part = position - static_cast<double>(rank);
  if (part == 0 || rank + 1 >= finite) return below;
  return below + (value_at(rank + 1) - below) * part;
}

template <class ValueAtRank>
QSIM_HD Range data_percentile(std::int64_t finite, double percentile, ValueAtRank value_at) {
  const auto last = static_cast<double>(finite - 1);
  const double dropped = last * ((100 - percentile) / 200);
  return {value_at_position(finite, dropped, value_at), value_at_position(finite, last - dropped, value_at)};
}

}  // namespace qsim
