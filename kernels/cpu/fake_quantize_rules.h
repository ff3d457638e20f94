// How one element is quantized: by the contract to the letter, or by a short cut that gives the same bits.
#pragma once

#include "fake_quantize_runs.h"
#include "qsim/exact_quotient.h"

namespace qsim::cpu {
namespace {

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool kFusedMultiplyAdd = true;
#else
constexpr bool kFusedMultiplyAdd = false;  // fmaf would be a call
#endif

// An element is in range where the clamp left alone what it was given; NaN, which equals nothing, is not.
template <class V>
struct Quantized {
  V value, before_clamp, after_clamp;
};

// Any grid. RN(1 / scale) of the `reciprocal` profile was computed once.
template <Rounding rounding>
struct ByContract {
  template <class T>
  QSIM_HD static T quotient(T x, const Entry<T>& grid) {
    return rounding == Rounding::divide ? x / grid.scale : x * grid.inverse;
  }
  template <class T>
  QSIM_HD static Quantized<T> quantize(T x, const Entry<T>& grid) {
    const T exact = quotient(x, grid), steps = nearest_steps(exact, grid);
    return {dequantize(steps, grid.scale), round_half_even(exact), steps};
  }
};

// Regular grids, rounding `divide`. What is clamped to the thresholds of the grid rounds into it: no second clamp.
struct ByThresholds {
  QSIM_HD static float quotient(float x, const Entry<float>& grid) {
    return kFusedMultiplyAdd ? exact_quotient(x, grid.scale, grid.inverse) : x / grid.scale;
  }
  QSIM_HD static Quantized<float> quantize(float x, const Entry<float>& grid) {
    const float clamped = clamp_keeping_nan(x, grid.lowest, grid.highest);
    const float steps = round_half_even(quotient(clamped, grid));
    return {kFusedMultiplyAdd ? fmaf(steps, grid.scale, 0.0f) : dequantize(steps, grid.scale), x, clamped};
  }
};

}  // namespace
}  // namespace qsim::cpu
