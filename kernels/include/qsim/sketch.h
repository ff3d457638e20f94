<<<<<<< HEAD
// The sketch: a histogram whose bins are the leading 14 bits of a float32 (sign, exponent, 5 bits of mantissa).
//
// No range needs to be known beforehand and counting is exact integer addition, so batches, threads and ranks merge in
// any order, bit for bit. A bin is at most 1/32 of its value wide. NaN and infinities are not counted; zeros of either
// sign share bin 0 with the subnormals below 2^-131.
#pragma once

#include <cstdint>

#include "qsim/finite_range.h"
#include "qsim/level.h"
=======
// The sketch that observers fill: one counter per float32_bits >> 18, that is sign, exponent and 5 bits of mantissa.
//
// The two bins around zero (|x| < 2^-131) count as zero. NaN and Inf never reach a sketch.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

>>>>>>> search
#include "qsim/portability.h"

namespace qsim {

<<<<<<< HEAD
inline constexpr int kSketchShift = 18;
inline constexpr int kSketchBins = 1 << (32 - kSketchShift);
inline constexpr int kNegativeBins = kSketchBins / 2;  // bins below are of positive numbers, from here on of negative
inline constexpr int kNonFiniteBins = 1 << (23 - kSketchShift);  // the last of either sign: where Inf and NaN would be
inline constexpr std::uint32_t kNegativeZero = 0x80000000u;

// Of a finite number's bits.
QSIM_HD int sketch_bin(std::uint32_t bits) {
  return static_cast<int>(bits == kNegativeZero ? 0 : bits >> kSketchShift);
}

namespace cpu {

// Private counters of one thread: all zero between uses. Four copies, so that equal neighbours do not wait for each
// other's store; each is padded, since copies a power of two apart would fall into the same cache sets.
struct SketchScratch {
  static constexpr int kCopies = 4, kStride = kSketchBins + 1104;
  alignas(64) std::uint32_t counters[kCopies * kStride];
};

struct ObserveKernels {
  // Extends range, counts and sketch by n elements. For small n: each element costs a 64-bit increment.
  void (*directly[4])(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, std::int64_t* sketch);
  // The same into scratch, for at most 2^31 elements between two calls of `flush`.
  void (*count[4])(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, SketchScratch& scratch);
  // Adds scratch to the sketch and clears it. `range` covers all that was counted.
  void (*flush)(SketchScratch& scratch, FiniteRange range, std::int64_t* sketch);
};
QSIM_LEVEL_TABLES(ObserveKernels, observe_kernels)

}  // namespace cpu
=======
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

>>>>>>> search
}  // namespace qsim
