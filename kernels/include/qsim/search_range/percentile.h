// The percentile method: the range that keeps a share of the values and drops equal tails. On the data by radix
// selection, which makes no copy and knows no order of the input that is slow; on a sketch linear inside a bin, clipped
// to the exact ends.
#pragma once

#include "qsim/number.h"
#include "qsim/search_range.h"
#include "qsim/sketch.h"

namespace qsim {

// Ascending as the values are; -0 before +0. And back.
QSIM_HD std::uint64_t order_key(float x) {
  const std::uint32_t bits = word_of(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
QSIM_HD std::uint64_t order_key(double x) {
  const auto bits = static_cast<std::uint64_t>(bits_of(x));
  return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}
QSIM_HD float value_of(std::uint64_t key, float) {
  const auto wanted = static_cast<std::uint32_t>(key);
  return float_of(wanted ^ (wanted >> 31 ? 0x80000000u : 0xffffffffu));
}
QSIM_HD double value_of(std::uint64_t key, double) {
  return number_of<double>(static_cast<std::int64_t>(key ^ (key >> 63 ? 1ull << 63 : ~0ull)));
}

inline constexpr int kDigits = 256;

// Radix selection of the value that has `rank` finite ones before it in ascending order. digit_at(found, shift, rank)
// is the digit in bits [shift, shift + 8) of its key, among the keys that begin with the digits found so far; `rank`
// becomes that among those that have this digit too.
template <class T, class DigitAt>
QSIM_HD T value_at_rank(std::int64_t rank, DigitAt digit_at) {
  std::uint64_t found = 0;
  for (int shift = 8 * sizeof(T) - 8; shift >= 0; shift -= 8) {
    found = found * kDigits + static_cast<std::uint64_t>(digit_at(found, shift, rank));
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

// The value with `dropped` of the values above it, in [-below.far, above.far].
QSIM_HD double upper_quantile(const SketchSideView& above, std::int64_t zeros, const SketchSideView& below,
                              double dropped) {
  for (int bin = above.last_bin(); bin >= above.first_bin(); --bin) {
    const auto count = static_cast<double>(above.counts[bin]);
    if (count > 0 && count >= dropped) return above.to(bin) - (above.to(bin) - above.from(bin)) * (dropped / count);
    dropped -= count;
  }
  if (zeros > 0 && static_cast<double>(zeros) >= dropped) return above.near - below.near;  // not 0: subnormals alone
  dropped -= static_cast<double>(zeros);
  for (int bin = below.first_bin(); bin <= below.last_bin(); ++bin) {
    const auto count = static_cast<double>(below.counts[bin]);
    if (count > 0 && count >= dropped) return -below.from(bin) - (below.to(bin) - below.from(bin)) * (dropped / count);
    dropped -= count;
  }
  return -below.far;
}

QSIM_HD std::int64_t count_values(const SketchView& sketch) {
  std::int64_t total = sketch.zeros;
  const SketchSideView sides[] = {sketch.below, sketch.above};
  for (const SketchSideView& side : sides) {
    for (int bin = side.first_bin(); bin <= side.last_bin(); ++bin) total += side.counts[bin];
  }
  return total;
}

QSIM_HD Range sketch_percentile(const SketchView& sketch, double percentile) {
  const double dropped = static_cast<double>(count_values(sketch)) * ((100 - percentile) / 200);
  return {-upper_quantile(sketch.below, sketch.zeros, sketch.above, dropped),
          upper_quantile(sketch.above, sketch.zeros, sketch.below, dropped)};
}

}  // namespace qsim
