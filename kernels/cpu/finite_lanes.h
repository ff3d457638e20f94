// Minimum and maximum of vectors of elements, and whether all were finite, in three operations a vector.
//
// The optimistic pass (`extend`) lets NaN and Inf show themselves: a NaN or two opposite Infs make the sum NaN, an Inf
// becomes an extreme. Blocks where that happens are read again by `extend_finite`, from the first-level cache. A sum
// that overflows costs the second reading and changes nothing.
#pragma once

#include "float_vector.h"
#include "qsim/finite_range.h"

namespace qsim::cpu {
namespace {

constexpr int kChains = 4;  // independent accumulators hide the latency of the additions
constexpr int kStep = kChains * kWidth;

struct Lanes {  // lowest > highest: nothing seen in that lane; finite throughout, so that x - x tells Inf
  Floats lowest[kChains], highest[kChains];

  QSIM_INLINE Lanes() {
    for (int j = 0; j < kChains; ++j) lowest[j] = all(FLT_MAX), highest[j] = all(-FLT_MAX);
  }
};

QSIM_INLINE bool finite(const Lanes& lanes, const Floats* sum) {
  Floats flag{};
  for (int j = 0; j < kChains; ++j) {
    flag += sum[j] * 0 + (lanes.lowest[j] - lanes.lowest[j]) + (lanes.highest[j] - lanes.highest[j]);
  }
  return !any(flag != flag);
}

QSIM_INLINE void extend(Lanes& lanes, Floats* sum, int chain, Floats x) {
  lanes.lowest[chain] = smaller(x, lanes.lowest[chain]);
  lanes.highest[chain] = larger(x, lanes.highest[chain]);
  sum[chain] += x;
}

struct LaneCounts {
  Ints nans{}, positive_infs{}, negative_infs{};

  QSIM_INLINE void add_to(NonFinite& counts) const {
    for (int i = 0; i < kWidth; ++i) {
      counts.merge({nans[i], positive_infs[i], negative_infs[i]});
    }
  }
};

// Extends one chain by the finite elements of x and counts the others; the first `skip` lanes are not counted (they
// were read before). Exact for any x.
QSIM_INLINE void extend_finite(Lanes& lanes, LaneCounts& counts, int chain, Floats x, int skip = 0) {
  const Floats magnitude = (Floats)((Words)x & 0x7fffffff);
  const Ints finite = magnitude <= FLT_MAX;
  lanes.lowest[chain] = smaller(finite ? x : all(FLT_MAX), lanes.lowest[chain]);
  lanes.highest[chain] = larger(finite ? x : all(-FLT_MAX), lanes.highest[chain]);
  Ints lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  const Ints counted = lane >= skip;
  counts.nans -= (x != x) & counted;
  counts.positive_infs -= (x > FLT_MAX) & counted;
  counts.negative_infs -= (x < -FLT_MAX) & counted;
}

QSIM_INLINE FiniteRange fold(const Lanes& lanes) {
  Floats low = lanes.lowest[0], high = lanes.highest[0];
  for (int j = 1; j < kChains; ++j) {
    low = smaller(low, lanes.lowest[j]);
    high = larger(high, lanes.highest[j]);
  }
  FiniteRange range{low[0], high[0]};
  for (int i = 1; i < kWidth; ++i) range.merge({low[i], high[i]});
  return range.lowest <= range.highest ? range : FiniteRange{};
}

constexpr std::int64_t kBlock = 1024;  // the unit of the second reading

// Extends lanes by n >= kWidth elements. The last vector overlaps its predecessor: min and max do not mind.
template <class T>
QSIM_INLINE void extend_block(Lanes& lanes, const T* x, std::int64_t n, NonFinite& counts) {
  Lanes next = lanes;
  Floats sum[kChains] = {};
  std::int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    for (int j = 0; j < kChains; ++j) extend(next, sum, j, load(x + i + j * kWidth));
  }
  for (; i < n; i += kWidth) extend(next, sum, 0, load(x + (i + kWidth <= n ? i : n - kWidth)));
  if (finite(next, sum)) [[likely]] {
    lanes = next;
    return;
  }
  LaneCounts found;
  for (i = 0; i + kWidth <= n; i += kWidth) extend_finite(lanes, found, 0, load(x + i));
  if (i < n) extend_finite(lanes, found, 0, load(x + n - kWidth), static_cast<int>(i - (n - kWidth)));
  found.add_to(counts);
}

// Extends range by n elements.
template <class T>
QSIM_INLINE void observe_run(const T* x, std::int64_t n, FiniteRange& range, NonFinite& counts) {
  if (n < kWidth) {
    for (std::int64_t i = 0; i < n; ++i) observe(load_one(x + i), range, counts);
    return;
  }
  Lanes lanes;
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t rest = n - i, size = rest < kBlock + kWidth ? rest : kBlock;
    extend_block(lanes, x + i, size, counts);
    i += size;
  }
  range.merge(fold(lanes));
}

}  // namespace
}  // namespace qsim::cpu
