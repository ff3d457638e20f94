// Gradient clipping that no NaN or Inf gets through: the norm of the finite elements, a count of the others, and
// scaling.
//
// The p-norm is a sum of |x|^p (a maximum for p = inf) in float64 over chunks of kGradChunk elements. Sums inside a
// chunk, over the chunks of a gradient and over gradients have a fixed order, so neither threads nor instruction sets
// change a bit. Squares of float32 cannot overflow.
#pragma once

#include <cmath>
#include <cstdint>

#include "qsim/finite_range.h"
#include "qsim/level.h"
#include "qsim/portability.h"

namespace qsim {

inline constexpr std::int64_t kGradChunk = 16384;
// Over gradients: lane l takes l, l + 32, ...; then the upper half joins the lower.
inline constexpr int kGradLanes = 32;

struct GradSum {
  double power = 0;  // sum of |x|^p, or max |x|
  std::int64_t nonfinite = 0;
};

QSIM_HD double join_powers(double a, double b, double p) { return p == INFINITY ? (a > b ? a : b) : a + b; }

QSIM_HD double norm_of_power(double power, double p) {
  return p == 2 ? sqrt(power) : p == 1 || p == INFINITY ? power : pow(power, 1 / p);
}

enum class NonFinitePolicy {
  skip,   // one such element: every gradient becomes 0
  zero,   // such elements become 0, the others are clipped
  raise,  // one such element: nothing is changed, the caller raises
};

// What becomes of every gradient.
struct GradScaling {
  enum Action { keep, scale, scale_finite, clear } action;  // scale_finite: what is not finite becomes 0
  double coefficient;
  double total_norm;  // NaN when a non-finite element was met and not replaced
};

// The coefficient is that of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
QSIM_HD GradScaling grad_scaling(GradSum total, double p, double max_norm, NonFinitePolicy policy) {
  const bool broken = total.nonfinite > 0;
  if (broken && policy == NonFinitePolicy::skip) return {GradScaling::clear, 0, NAN};
  if (broken && policy == NonFinitePolicy::raise) return {GradScaling::keep, 1, NAN};
  const double norm = norm_of_power(total.power, p), ratio = max_norm / (norm + 1e-6);
  const double coefficient = ratio < 1 ? ratio : 1;
  const auto action = broken ? GradScaling::scale_finite : coefficient < 1 ? GradScaling::scale : GradScaling::keep;
  return {action, coefficient, norm};
}

namespace cpu {

// Power and count of one chunk of n <= kGradChunk elements.
using SumGrad = GradSum (*)(const void* x, std::int64_t n, double p);
// x * coefficient, in float32 (float64 for f64), rounded once. `finite_only`: other elements become 0; else there are
// none.
using ScaleGrad = void (*)(void* x, std::int64_t n, double coefficient, bool finite_only);

struct ClipGradKernels {
  ByElement<SumGrad> sum;
  ByElement<ScaleGrad> scale;
};
QSIM_LEVEL_TABLES(ClipGradKernels, clip_grad_kernels)

}  // namespace cpu
}  // namespace qsim
