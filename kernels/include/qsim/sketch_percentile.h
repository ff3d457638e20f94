// The range that keeps a share of a sketch's values and drops equal tails: linear inside a bin, clipped to the exact
// ends.
#pragma once

#include "qsim/search_range.h"
#include "qsim/sketch.h"

namespace qsim {

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
