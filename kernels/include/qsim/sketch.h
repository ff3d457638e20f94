// The sketch: a histogram whose bins are the leading 14 bits of a float32 (sign, exponent, 5 bits of mantissa).
//
// No range needs to be known beforehand and counting is exact integer addition, so batches, threads and ranks merge in
// any order, bit for bit. A bin is at most 1/32 of its value wide. NaN and infinities are not counted; zeros of either
// sign share bin 0 with the subnormals below 2^-131.
#pragma once

#include <cstdint>

#include "qsim/finite_range.h"
#include "qsim/level.h"
#include "qsim/portability.h"

namespace qsim {

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
}  // namespace qsim
