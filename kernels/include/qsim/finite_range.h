// Exact minimum and maximum of the finite elements, and counts of the others (docs/numerics.md, section 3).
//
// Additive: states of disjoint inputs merge in any order to the state of their union, bit for bit. Zeros of either sign
// are stored as +0.0, since min and max do not order them. Every input is taken as float32, so a float64 element beyond
// float32 counts as infinite.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "qsim/element.h"
#include "qsim/level.h"
#include "qsim/number.h"
#include "qsim/portability.h"

namespace qsim {

struct FiniteRange {  // lowest > highest: nothing seen
  float lowest = INFINITY, highest = -INFINITY;

  QSIM_HD void merge(FiniteRange other) {
    lowest = (other.lowest < lowest ? other.lowest : lowest) + 0.f;
    highest = (other.highest > highest ? other.highest : highest) + 0.f;
  }
};

struct NonFinite {
  std::int64_t nans = 0, positive_infs = 0, negative_infs = 0;

  QSIM_HD void merge(NonFinite other) {
    nans += other.nans;
    positive_infs += other.positive_infs;
    negative_infs += other.negative_infs;
  }
};

// One element of any kind.
QSIM_HD void observe(float x, FiniteRange& range, NonFinite& counts) {
  if (is_finite(x)) {
    range.merge({x, x});
  } else {
    counts.nans += x != x;
    counts.positive_infs += x > 0;
    counts.negative_infs += x < 0;
  }
}

namespace cpu {

// Extends the ranges by x, a contiguous [outer, ranges, inner]: element (o, r, i) belongs to range r. One read of x.
using ObserveRange = void (*)(const void* x, std::int64_t outer, std::int64_t ranges, std::int64_t inner, float* lowest,
                              float* highest, NonFinite& counts);

struct ObserveRangeKernels {
  ByElement<ObserveRange> of;
};
QSIM_LEVEL_TABLES(ObserveRangeKernels, observe_range_kernels)

}  // namespace cpu
}  // namespace qsim
