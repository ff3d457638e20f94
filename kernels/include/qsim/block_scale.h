// Scales of blocks that are stored in few bits themselves (docs/numerics.md, section 9): powers of two (E8M0, of the
// OCP MX formats), and E4M3 numbers beside one float32 a tensor (NVFP4). Scales in float32 are choose_qparams'.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "qsim/finite_range.h"
#include "qsim/level.h"
#include "qsim/number.h"
#include "qsim/portability.h"
#include "qsim/round_to_format.h"

namespace qsim {

enum class ScaleFormat { e8m0, e4m3 };

// Which power of two: see power_of_two_exponent.
enum class ScaleRounding { floor, ceil, even, rceil };

// What a block's elements are stored as. Integers are fractions, as MXINT8's are: q * unit, with unit = 2^-6.
struct BlockElement {
  int mantissa;   // explicit bits
  int exponent;   // of the largest power of two that is one of its numbers
  float largest;  // number
  float unit;     // of the numbers that are scaled: 1 for floats
};

struct BlockScaleRule {
  ScaleFormat format;
  ScaleRounding rounding;  // of e8m0
  BlockElement element;
  FormatIn<float> e4m3;  // saturating
};

// Positive numbers, subnormal float32 among them, which are normal in float64.
QSIM_HD int floor_log2(double x) { return static_cast<int>(bits_of(x) >> 52) - 1023; }

// OCP Microscaling Formats (MX) Specification v1.0, section 6.3: the largest power of two in the block over the largest
// power of two in the element format (floor). The others, by the names that torchao gives them: `ceil` rounds the power
// up; `even` takes it after the magnitude was rounded to the mantissa of the element; `rceil` is the least power with
// which nothing saturates (NVIDIA, cuBLAS 12.9 documentation, "1D block scaling": cvt.rp.satfinite.ue8m0x2).
QSIM_HD int power_of_two_exponent(double magnitude, const BlockScaleRule& rule) {
  const BlockElement& element = rule.element;
  const auto rounded_up = [](double x) { return floor_log2(x) + ((bits_of(x) << 12) != 0 ? 1 : 0); };
  switch (rule.rounding) {
    case ScaleRounding::ceil:
      return rounded_up(magnitude) - element.exponent;
    case ScaleRounding::even: {
      const std::int64_t half = std::int64_t{1} << (51 - element.mantissa);
      return floor_log2(number_of<double>(bits_of(magnitude) + half)) - element.exponent;
    }
    case ScaleRounding::rceil:
      return rounded_up(magnitude / element.largest);
    default:
      return floor_log2(magnitude) - element.exponent;
  }
}

// E8M0 has the powers 2^-127 .. 2^127. Times `unit` the least is 2^-133, a subnormal float32.
QSIM_HD float power_of_two_scale(double magnitude, const BlockScaleRule& rule) {
  const int exponent = power_of_two_exponent(magnitude, rule);
  const std::int64_t kept = exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
  return static_cast<float>(number_of<double>((kept + 1023) << 52) * rule.element.unit);
}

// The float32 scale of a tensor whose blocks have E4M3 scales: the largest block's becomes 448. NVIDIA ModelOpt,
// nvfp4_tensor.py; "Pretraining Large Language Models with NVFP4" (NVIDIA 2025, arXiv 2509.25149), appendix C.
QSIM_HD float scale_of_tensor(float magnitude, const BlockScaleRule& rule) {
  const float scale = magnitude / (448 * rule.element.largest);
  return magnitude == 0 ? 1 : scale < FLT_MIN ? FLT_MIN : scale;
}

// The E4M3 scale of a block times that of the tensor; a scale that would round to 0 is the least of E4M3.
QSIM_HD float two_level_scale(float magnitude, const BlockScaleRule& rule, float of_tensor) {
  const float exact = magnitude / (rule.element.largest * of_tensor);
  const float stored = round_to_format<false>(exact < 0x1p-9f ? 0x1p-9f : exact, rule.e4m3);
  return (magnitude == 0 ? 1 : stored) * of_tensor;
}

// NaN where the range is empty or not finite. of_tensor: scale_of_tensor of the union of all ranges; read for E4M3
// only.
QSIM_HD float block_scale(FiniteRange range, const BlockScaleRule& rule, float of_tensor) {
  const float magnitude = -range.lowest > range.highest ? -range.lowest : range.highest;
  if (!(range.lowest <= range.highest) || !is_finite(magnitude)) return NAN;
  if (rule.format == ScaleFormat::e4m3) return two_level_scale(magnitude, rule, of_tensor);
  return magnitude == 0 ? 1 : power_of_two_scale(magnitude, rule);
}

namespace cpu {

struct BlockScaleKernels {
  // magnitude: of the whole tensor.
  void (*run)(const float* low, const float* high, std::int64_t n, const BlockScaleRule& rule, float magnitude,
              float* scale);
};
QSIM_LEVEL_TABLES(BlockScaleKernels, block_scale_kernels)

}  // namespace cpu
}  // namespace qsim
