// Rounding that is learned: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", sections
// 3.2 and 4. A number lies `up` of a step above the one below its target; `up` is a stretched sigmoid of a variable,
// cut to 0 .. 1, and a regulariser presses it to one of these.
#pragma once

#include <cmath>
#include <cstdint>

#include "qsim/exponential.h"
#include "qsim/level.h"
#include "qsim/portability.h"

namespace qsim {

// A step of Adam (Kingma and Ba 2015, algorithm 1) on `weight * (1 - |2 up - 1|^exponent)` and what `errors` say.
struct SoftRounding {
  float weight, exponent;
  float rate, root;  // of the step, by the correction of the mean; 1 by the root of the correction of the squares

  static constexpr float kLow = -0.1f, kHigh = 1.1f;
  static constexpr float kMean = 0.9f, kSquare = 0.999f, kEpsilon = 1e-8f;

  struct Up {
    float value, slope;  // of the variable
  };
  static QSIM_HD Up up(float variable) {
    const float sigmoid = 1 / (1 + exponential(-variable)), stretched = sigmoid * (kHigh - kLow) + kLow;
    const float slope = sigmoid * (1 - sigmoid) * (kHigh - kLow);
    return {clamp_keeping_nan(stretched, 0.0f, 1.0f), unless_outside(slope, stretched, 0, 1)};
  }

  // x, 0 where `at` is not from `low` to `high`. In two steps, which compilers vectorise.
  static QSIM_HD float unless_outside(float x, float at, float low, float high) {
    x = at < low ? 0 : x;
    return at > high ? 0 : x;
  }

  // The gradient of the regulariser by `up`.
  QSIM_HD float pressed(float up) const {
    constexpr float kLeast = 1e-30f;  // of what has a logarithm
    const float apart = 2 * up - 1, size = apart < 0 ? -apart : apart;
    return -2 * weight * exponent * apart * exponential((exponent - 2) * logarithm(size < kLeast ? kLeast : size));
  }
};

// The numbers of a row, each with what Adam knows of it: `errors` holds the gradient of the loss by them and gets those
// after the step. `stride` as in RowGrid.
struct SoftRow {
  std::int64_t columns;
  float *variable, *mean, *square, *errors;
  const float *target, *step, *low, *high;
  std::int64_t stride;
};

// Column `i`, whose grid lies at `of`.
QSIM_HD void soft_round(const SoftRow& row, std::int64_t i, std::int64_t of, const SoftRounding& how) {
  using Rounding = SoftRounding;
  const float target = row.target[i], step = row.step[of], low = row.low[of], high = row.high[of];
  const float below = floorf(target / step);
  const auto before = Rounding::up(row.variable[i]);
  const float pull = Rounding::unless_outside(row.errors[i] * step, below + before.value, low, high);
  const float gradient = (pull + how.pressed(before.value)) * before.slope;
  const float mean = row.mean[i] + (gradient - row.mean[i]) * (1 - Rounding::kMean);
  const float square = row.square[i] * Rounding::kSquare + gradient * gradient * (1 - Rounding::kSquare);
  const float variable = row.variable[i] - how.rate * (mean / (sqrtf(square) * how.root + Rounding::kEpsilon));
  row.mean[i] = mean;
  row.square[i] = square;
  row.variable[i] = variable;
  row.errors[i] = clamp_keeping_nan(below + Rounding::up(variable).value, low, high) * step - target;
}

namespace cpu {

struct SoftRoundKernels {
  void (*round)(const SoftRow& row, const SoftRounding& how);
};
QSIM_LEVEL_TABLES(SoftRoundKernels, soft_round_kernels)

}  // namespace cpu
}  // namespace qsim
