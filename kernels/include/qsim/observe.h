// Counts, exact finite range and sketch of a tensor, in one pass (docs/numerics.md, section 3).
#pragma once

#include <cstdint>

#include "qsim/finite_range.h"
#include "qsim/level.h"
#include "qsim/sketch.h"

namespace qsim::cpu {

// Private counters of one thread: all zero between uses. Eight copies, so that equal neighbours do not wait for each
// other's store; each is padded, since copies a power of two apart would fall into the same cache sets. 16 bits, so
// that the bins of ordinary data stay in the first-level cache eight times.
struct SketchScratch {
  static constexpr int kCopies = 8, kStride = kSketchBins + 1104;
  alignas(64) std::uint16_t counters[kCopies * kStride];
  std::uint32_t negative_zeros;  // counted with the smallest negative numbers, among which they do not belong
  std::uint32_t low_bits;        // those of all elements, ORed

  static constexpr std::int64_t kMost = kCopies * 65535;  // elements between two flushes: the copies take turns
};

// Extends range, counts and sketch by n elements. For small n: each element costs a 64-bit increment.
using ObserveDirectly = void (*)(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, Sketch sketch);
// The same into scratch, for at most SketchScratch::kMost elements between two flushes.
using CountSketch = void (*)(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts,
                             SketchScratch& scratch);

struct ObserveKernels {
  ByElement<ObserveDirectly> directly;
  ByElement<CountSketch> count;
  // Adds scratch to the sketch and clears it. `range` covers all that was counted.
  void (*flush)(SketchScratch& scratch, FiniteRange range, Sketch sketch);
};
QSIM_LEVEL_TABLES(ObserveKernels, observe_kernels)

}  // namespace qsim::cpu
