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

template <int chains>
struct Lanes {  // lowest > highest: nothing seen in that lane; finite throughout, so that x - x tells Inf
  Floats lowest[chains], highest[chains];

  QSIM_INLINE Lanes() {
    for (int j = 0; j < chains; ++j) lowest[j] = all(FLT_MAX), highest[j] = all(-FLT_MAX);
  }
};

template <int chains>
struct Sums {
  Floats of[chains]{};
};

template <int chains>
QSIM_INLINE bool finite(const Lanes<chains>& lanes, const Sums<chains>& sums) {
  Floats flag{};
  for (int j = 0; j < chains; ++j) {
    flag += sums.of[j] * 0 + (lanes.lowest[j] - lanes.lowest[j]) + (lanes.highest[j] - lanes.highest[j]);
  }
  return !any(flag != flag);
}

template <int chains>
QSIM_INLINE void extend(Lanes<chains>& lanes, Sums<chains>& sums, int chain, Floats x) {
  lanes.lowest[chain] = smaller(x, lanes.lowest[chain]);
  lanes.highest[chain] = larger(x, lanes.highest[chain]);
  sums.of[chain] += x;
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
template <int chains>
QSIM_INLINE void extend_finite(Lanes<chains>& lanes, LaneCounts& counts, int chain, Floats x, int skip = 0) {
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

// Of all lanes, by halves: the upper half of a register meets the lower.
template <int bytes>
struct Register {
  typedef float Lanes __attribute__((vector_size(bytes)));
};

template <int bytes>
QSIM_INLINE FiniteRange fold(typename Register<bytes>::Lanes low, typename Register<bytes>::Lanes high) {
  typename Register<bytes / 2>::Lanes lows[2], highs[2];
  std::memcpy(lows, &low, sizeof low);
  std::memcpy(highs, &high, sizeof high);
  return fold<bytes / 2>(lows[1] < lows[0] ? lows[1] : lows[0], highs[1] > highs[0] ? highs[1] : highs[0]);
}

template <>
QSIM_INLINE FiniteRange fold<8>(Register<8>::Lanes low, Register<8>::Lanes high) {
  return {low[1] < low[0] ? low[1] : low[0], high[1] > high[0] ? high[1] : high[0]};
}

template <int chains>
QSIM_INLINE FiniteRange fold(const Lanes<chains>& lanes) {
  Floats low = lanes.lowest[0], high = lanes.highest[0];
  for (int j = 1; j < chains; ++j) {
    low = smaller(low, lanes.lowest[j]);
    high = larger(high, lanes.highest[j]);
  }
  const FiniteRange range = fold<kVectorBytes>(low, high);
  return range.lowest <= range.highest ? range : FiniteRange{};
}

constexpr std::int64_t kBlock = 1024;  // the unit of the second reading

// The second reading, of n >= kWidth elements.
template <int chains, class T>
QSIM_INLINE void extend_block_finite(Lanes<chains>& lanes, const T* x, std::int64_t n, NonFinite& counts) {
  LaneCounts found;
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) extend_finite(lanes, found, 0, load(x + i));
  if (i < n) extend_finite(lanes, found, 0, load(x + n - kWidth), static_cast<int>(i - (n - kWidth)));
  found.add_to(counts);
}

// Extends lanes by n >= kWidth elements. The last vector overlaps its predecessor: min and max do not mind.
template <int chains, class T>
QSIM_INLINE void extend_block(Lanes<chains>& lanes, const T* x, std::int64_t n, NonFinite& counts) {
  Lanes<chains> next = lanes;
  Sums<chains> sums;
  std::int64_t i = 0;
  for (; i + chains * kWidth <= n; i += chains * kWidth) {
    for (int j = 0; j < chains; ++j) extend(next, sums, j, load(x + i + j * kWidth));
  }
  for (; i < n; i += kWidth) extend(next, sums, 0, load(x + (i + kWidth <= n ? i : n - kWidth)));
  if (finite(next, sums)) [[likely]] {
    lanes = next;
  } else {
    extend_block_finite(lanes, x, n, counts);
  }
}

template <int chains, class T>
QSIM_INLINE FiniteRange range_of_run(const T* x, std::int64_t n, NonFinite& counts) {
  Lanes<chains> lanes;
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t rest = n - i, size = rest < kBlock + kWidth ? rest : kBlock;
    extend_block(lanes, x + i, size, counts);
    i += size;
  }
  return fold(lanes);
}

// Extends range by n elements.
template <class T>
QSIM_INLINE void observe_run(const T* x, std::int64_t n, FiniteRange& range, NonFinite& counts) {
  if (n < kWidth) {
    for (std::int64_t i = 0; i < n; ++i) observe(load_one(x + i), range, counts);
  } else if (n < 2 * kStep) {  // too short for the chains to pay for their setting up
    range.merge(range_of_run<1>(x, n, counts));
  } else {
    range.merge(range_of_run<kChains>(x, n, counts));
  }
}

}  // namespace
}  // namespace qsim::cpu
