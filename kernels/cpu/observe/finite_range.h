// Minimum and maximum of finite elements, and whether all were finite, in three operations a register. The loops of
// range.cpp and sketch.cpp are made of these.
//
// The optimistic pass (`extend`) lets NaN and Inf show themselves: a NaN or two opposite Infs make the sum NaN, an Inf
// becomes an extreme. Blocks where that happens are read again by `extend_finite`, from the first-level cache. A sum
// that overflows costs the second reading and changes nothing.
#pragma once

#include "qsim/finite_range.h"
#include "vector/registers.h"

namespace qsim::cpu {
namespace {

constexpr int kChains = 4;  // independent accumulators hide the latency of the additions
constexpr int kChained = kChains * kFloats;

template <int chains>
struct Extremes {  // lowest > highest: nothing seen in that lane; finite throughout, so that x - x tells Inf
  Floats lowest[chains], highest[chains];

  QSIM_INLINE Extremes() {
    for (int j = 0; j < chains; ++j) lowest[j] = all(FLT_MAX), highest[j] = all(-FLT_MAX);
  }
};

template <int chains>
struct Sums {
  Floats of[chains]{};
};

template <int chains>
QSIM_INLINE bool finite(const Extremes<chains>& extremes, const Sums<chains>& sums) {
  Floats flag{};
  for (int j = 0; j < chains; ++j) {
    flag += sums.of[j] * 0 + (extremes.lowest[j] - extremes.lowest[j]) + (extremes.highest[j] - extremes.highest[j]);
  }
  return !any(flag != flag);
}

template <int chains>
QSIM_INLINE void extend(Extremes<chains>& extremes, Sums<chains>& sums, int chain, Floats x) {
  extremes.lowest[chain] = minimum(x, extremes.lowest[chain]);
  extremes.highest[chain] = maximum(x, extremes.highest[chain]);
  sums.of[chain] += x;
}

struct NonFiniteLanes {
  Ints nans{}, positive_infs{}, negative_infs{};

  QSIM_INLINE void add_to(NonFinite& counts) const {
    for (int i = 0; i < kFloats; ++i) {
      counts.merge({nans[i], positive_infs[i], negative_infs[i]});
    }
  }
};

// Extends one chain by the finite elements of x and counts the others; the first `skip` lanes are not counted (they
// were read before). Exact for any x.
template <int chains>
QSIM_INLINE void extend_finite(Extremes<chains>& extremes, NonFiniteLanes& counts, int chain, Floats x, int skip = 0) {
  const Floats magnitude = (Floats)((Words)x & 0x7fffffff);
  const Ints finite = magnitude <= FLT_MAX;
  extremes.lowest[chain] = minimum(finite ? x : all(FLT_MAX), extremes.lowest[chain]);
  extremes.highest[chain] = maximum(finite ? x : all(-FLT_MAX), extremes.highest[chain]);
  const Ints counted = lane_numbers<float>() >= skip;
  counts.nans -= (x != x) & counted;
  counts.positive_infs -= (x > FLT_MAX) & counted;
  counts.negative_infs -= (x < -FLT_MAX) & counted;
}

// Of all lanes, by halves: the upper half of a register meets the lower.
template <int bytes>
QSIM_INLINE FiniteRange fold(typename VectorOf<float, bytes>::type low, typename VectorOf<float, bytes>::type high) {
  typename VectorOf<float, bytes / 2>::type lows[2], highs[2];
  std::memcpy(lows, &low, sizeof low);
  std::memcpy(highs, &high, sizeof high);
  return fold<bytes / 2>(lows[1] < lows[0] ? lows[1] : lows[0], highs[1] > highs[0] ? highs[1] : highs[0]);
}

template <>
QSIM_INLINE FiniteRange fold<8>(VectorOf<float, 8>::type low, VectorOf<float, 8>::type high) {
  return {low[1] < low[0] ? low[1] : low[0], high[1] > high[0] ? high[1] : high[0]};
}

template <int chains>
QSIM_INLINE FiniteRange fold(const Extremes<chains>& extremes) {
  Floats low = extremes.lowest[0], high = extremes.highest[0];
  for (int j = 1; j < chains; ++j) {
    low = minimum(low, extremes.lowest[j]);
    high = maximum(high, extremes.highest[j]);
  }
  const FiniteRange range = fold<kRegisterBytes>(low, high);
  return range.lowest <= range.highest ? range : FiniteRange{};
}

constexpr std::int64_t kRereadBlock = 1024;  // the unit of the second reading

// The second reading, of n >= kFloats elements.
template <int chains, class T>
QSIM_INLINE void extend_block_finite(Extremes<chains>& extremes, const T* x, std::int64_t n, NonFinite& counts) {
  NonFiniteLanes found;
  std::int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats) extend_finite(extremes, found, 0, load(x + i));
  if (i < n) extend_finite(extremes, found, 0, load(x + n - kFloats), static_cast<int>(i - (n - kFloats)));
  found.add_to(counts);
}

// Extends `extremes` by n >= kFloats elements. The last register overlaps its predecessor: min and max do not mind.
template <int chains, class T>
QSIM_INLINE void extend_block(Extremes<chains>& extremes, const T* x, std::int64_t n, NonFinite& counts) {
  Extremes<chains> next = extremes;
  Sums<chains> sums;
  std::int64_t i = 0;
  for (; i + chains * kFloats <= n; i += chains * kFloats) {
    for (int j = 0; j < chains; ++j) extend(next, sums, j, load(x + i + j * kFloats));
  }
  for (; i < n; i += kFloats) extend(next, sums, 0, load(x + (i + kFloats <= n ? i : n - kFloats)));
  if (finite(next, sums)) [[likely]] {
    extremes = next;
  } else {
    extend_block_finite(extremes, x, n, counts);
  }
}

template <int chains, class T>
QSIM_INLINE FiniteRange range_of_run(const T* x, std::int64_t n, NonFinite& counts) {
  Extremes<chains> extremes;
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t rest = n - i, size = rest < kRereadBlock + kFloats ? rest : kRereadBlock;
    extend_block(extremes, x + i, size, counts);
    i += size;
  }
  return fold(extremes);
}

// Extends range by n elements.
template <class T>
QSIM_INLINE void observe_run(const T* x, std::int64_t n, FiniteRange& range, NonFinite& counts) {
  if (n < kFloats) {
    for (std::int64_t i = 0; i < n; ++i) observe(load_one(x + i), range, counts);
  } else if (n < 2 * kChained) {  // too short for the chains to pay for their setting up
    range.merge(range_of_run<1>(x, n, counts));
  } else {
    range.merge(range_of_run<kChains>(x, n, counts));
  }
}

}  // namespace
}  // namespace qsim::cpu
