// Running ranges for training: the range moves towards that of each batch, and scale and zero point follow it
// (docs/numerics.md, section 4, `ema`).
#pragma once

#include <cstdint>

#include "qsim/choose_qparams.h"
#include "qsim/finite_range.h"
#include "qsim/level.h"
#include "qsim/portability.h"

namespace qsim {

// averaging: the weight of a batch, in [0, 1].
struct RunningRule {
  double averaging;
  QuantGrid grid;
  double min_scale;
};

// Arrays with an entry per range.
struct RunningRanges {
  float *lowest, *highest;
  float* scale;
  std::int32_t* zero_point;
};

// In float64 and rounded once: between the two, and equal to both where they are equal.
QSIM_HD float moved(float running, float batch, double averaging) {
  return static_cast<float>((1 - averaging) * running + averaging * batch) + 0.f;
}

// Range i after a batch. The first batch with a finite element is the range; one without leaves everything as it is.
QSIM_HD void follow(FiniteRange batch, std::int64_t i, const RunningRule& rule, RunningRanges ranges) {
  if (batch.lowest > batch.highest) return;
  FiniteRange range{ranges.lowest[i], ranges.highest[i]};
  const double averaging = range.lowest <= range.highest ? rule.averaging : 1;
  range = averaging < 1 ? FiniteRange{moved(range.lowest, batch.lowest, averaging),
                                      moved(range.highest, batch.highest, averaging)}
                        : batch;
  const QuantParams<float> params = choose_qparams<float>(range.lowest, range.highest, rule.grid, rule.min_scale);
  ranges.lowest[i] = range.lowest;
  ranges.highest[i] = range.highest;
  ranges.scale[i] = params.scale;
  ranges.zero_point[i] = params.zero_point;
}

namespace cpu {

struct RunningRangeKernels {
  void (*follow)(const float* lowest, const float* highest, std::int64_t n, const RunningRule& rule,
                 RunningRanges ranges);
};
QSIM_LEVEL_TABLES(RunningRangeKernels, running_range_kernels)

}  // namespace cpu
}  // namespace qsim
