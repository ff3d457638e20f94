// The percentile method: the range that keeps a share of the values and drops equal tails. On the data by radix
// selection, which makes no copy and knows no order of the input that is slow; on a sketch linear inside a bin, clipped
// to the exact ends.
#pragma once

#include "qsim/number.h"
#include "qsim/search_range.h"
#include "qsim/search_range/team.h"
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

// The value of a side with `dropped` values of the side before it, in the order of bins place(0), place(1), ...;
// value_in(bin, part) is that which has a part of its bin's before it. False, and `dropped` less the side's values,
// when there are too few.
template <class Place, class ValueIn, class Team>
QSIM_HD bool quantile_of_side(const SketchSideView& side, Place place, ValueIn value_in, double& dropped, double& value,
                              const Team& team) {
  const int bins = side.last_bin() - side.first_bin() + 1;
  for (int tile = 0; tile < bins; tile += Team::kSize) {
    const int i = tile + team.rank(), bin = i < bins ? place(i) : 0;
    const std::int64_t here = i < bins ? side.counts[bin] : 0;
    std::int64_t all;
    const auto before = static_cast<double>(team.sum_before(here, all)), count = static_cast<double>(here);
    const bool found = here > 0 && count >= dropped - before;
    if (found) value = value_in(bin, (dropped - before) / count);
    if (team.first(found, value)) return true;
    dropped -= static_cast<double>(all);
  }
  return false;
}

// The value with `dropped` of the values above it, in [-below.far, above.far].
template <class Team>
QSIM_HD double upper_quantile(const SketchSideView& above, std::int64_t zeros, const SketchSideView& below,
                              double dropped, const Team& team) {
  double value = 0;
  const auto downwards = [&](int i) { return above.last_bin() - i; };
  const auto from_top = [&](int bin, double part) { return above.to(bin) - (above.to(bin) - above.from(bin)) * part; };
  if (quantile_of_side(above, downwards, from_top, dropped, value, team)) return value;
  if (zeros > 0 && static_cast<double>(zeros) >= dropped) return above.near - below.near;  // not 0: subnormals alone
  dropped -= static_cast<double>(zeros);
  const auto upwards = [&](int i) { return below.first_bin() + i; };
  const auto from_zero = [&](int bin, double part) {
    return -below.from(bin) - (below.to(bin) - below.from(bin)) * part;
  };
  return quantile_of_side(below, upwards, from_zero, dropped, value, team) ? value : -below.far;
}

template <class Team>
QSIM_HD std::int64_t count_values(const SketchView& sketch, const Team& team) {
  std::int64_t total = 0;
  const SketchSideView sides[] = {sketch.below, sketch.above};
  for (const SketchSideView& side : sides) {
    for (int bin = side.first_bin() + team.rank(); bin <= side.last_bin(); bin += Team::kSize) {
      total += side.counts[bin];
    }
  }
  return sketch.zeros + team.sum(total);
}

template <class Team>
QSIM_HD Range sketch_percentile(const SketchView& sketch, double percentile, const Team& team) {
  const double dropped = static_cast<double>(count_values(sketch, team)) * ((100 - percentile) / 200);
  return {-upper_quantile(sketch.below, sketch.zeros, sketch.above, dropped, team),
          upper_quantile(sketch.above, sketch.zeros, sketch.below, dropped, team)};
}

}  // namespace qsim
