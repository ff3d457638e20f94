// The sketch that observers fill: one counter per float32_bits >> 18, that is sign, exponent and 5 bits of mantissa.
//
// The two bins around zero (|x| < 2^-131) count as zero. NaN and Inf never reach a sketch.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "qsim/portability.h"

namespace qsim {

constexpr int kSketchSide = 8192;  // bins of one sign, ascending magnitude: 8160 finite ones, then Inf and NaN
constexpr int kSketchBins = 2 * kSketchSide;
constexpr int kSketchPastLast = 8160;  // the edge of this bin is Inf

QSIM_HD int sketch_bin(double magnitude) {  // of one sign: magnitude >= 0
  const float x = magnitude <= FLT_MAX ? static_cast<float>(magnitude) : INFINITY;
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return static_cast<int>(bits >> 18);
}

QSIM_HD double sketch_edge(int bin) {  // the smallest magnitude in the bin
  const std::uint32_t bits = static_cast<std::uint32_t>(bin) << 18;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// One sign of a sketch whose values all have magnitudes in [near, far]; without values: far = 0.
struct SketchSideView {
  const std::int64_t* counts;
  double near, far;

  QSIM_HD int first_bin() const {
    const int bin = sketch_bin(near);
    return bin > 1 ? bin : 1;
  }
  QSIM_HD int last_bin() const { return sketch_bin(far); }  // less than first_bin() without values
  QSIM_HD double from(int bin) const {
    const double edge = sketch_edge(bin);
    return edge > near ? edge : near;
  }
  QSIM_HD double to(int bin) const {
    const double edge = sketch_edge(bin + 1);
    return edge < far ? edge : far;
  }
};

struct SketchView {
  SketchSideView below, above;
  std::int64_t zeros;
};

QSIM_HD SketchView view_sketch(const std::int64_t* sketch, double lowest, double highest) {
  return {{sketch + kSketchSide, highest < 0 ? -highest : 0.0, lowest < 0 ? -lowest : 0.0},
          {sketch, lowest > 0 ? lowest : 0.0, highest > 0 ? highest : 0.0},
          sketch[0] + sketch[kSketchSide]};
}

}  // namespace qsim
