// Counts, range and sketch in one pass. The bindings call it through observe_kernels(): each thread counts into a
// SketchScratch of its own and flushes it.
#include "qsim/observe.h"

#include "observe/finite_range.h"
#include "vector/convert.h"

namespace qsim::cpu {

namespace {

template <class T>
void observe_directly(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, Sketch sketch) {
  float buffer[kRereadBlock];
  std::uint32_t low_bits = 0;
  for (std::int64_t i = 0; i < n; i += kRereadBlock) {
    const std::int64_t size = n - i < kRereadBlock ? n - i : kRereadBlock;
    const float* block = converted(static_cast<const T*>(x) + i, size, buffer);
    observe_run(block, size, range, counts);
    for (std::int64_t j = 0; j < size; ++j) {
      if (!is_finite(block[j])) continue;
      const std::uint32_t bits = word_of(block[j]);
      ++sketch.counts[sketch_bin(bits)];
      low_bits |= bits;
    }
  }
  *sketch.low_bits |= static_cast<std::int32_t>(low_bits & kLowBits);
}

constexpr int kStride = SketchScratch::kStride, kCopies = SketchScratch::kCopies;

// Two elements from one 64-bit load: half of the load instructions. All bins alike, so that the time does not depend on
// the data: what is not finite lands in bins that `flush` drops.
QSIM_INLINE void count_pair(const float* x, std::uint16_t* copies) {
  const std::uint64_t pair = load_as<std::uint64_t>(x);
  ++copies[(pair >> kSketchShift) & (kSketchBins - 1)];
  ++copies[kStride + (pair >> (32 + kSketchShift))];
}

struct Seen {
  Extremes<1> extremes;  // a register is loaded every kFloats cycles: no chain waits
  Ints negative_zeros{};
  Words bits{};  // ORed
};

QSIM_INLINE Words bits_of_finite(const float* x) {
  Words all_bits{};
  for (std::int64_t i = 0; i < kRereadBlock; i += kFloats) {
    const Words bits = load_as<Words>(x + i);
    all_bits |= bits & (Words)((bits & 0x7f800000) != 0x7f800000);
  }
  return all_bits;
}

// kRereadBlock elements. Counting is bound by the one store that the processor makes in a cycle: the range is found in
// between, in the slots that are left.
QSIM_INLINE void count_block(const float* x, Seen& seen, NonFinite& counts, std::uint16_t* counters) {
  Extremes<1> next = seen.extremes;
  Sums<1> sums;
  Words bits = seen.bits;
  for (std::int64_t i = 0; i < kRereadBlock; i += kChained) {
#pragma GCC unroll 4
    for (int j = 0; j < kChains; ++j) {
      const float* part = x + i + j * kFloats;
      const Floats vector = load(part);
      extend(next, sums, 0, vector);
      bits |= (Words)vector;
      seen.negative_zeros -= (Words)vector == kNegativeZero;
#pragma GCC unroll 8
      for (int k = 0; k < kFloats; k += 2) count_pair(part + k, counters + (j * kFloats + k) % kCopies * kStride);
    }
  }
  if (finite(next, sums)) [[likely]] {
    seen.extremes = next;
    seen.bits = bits;
  } else {
    seen.bits |= bits_of_finite(x);
    extend_block_finite(seen.extremes, x, kRereadBlock, counts);
  }
}

template <class T>
void count(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, SketchScratch& scratch) {
  float buffer[kRereadBlock];
  Seen seen;
  const std::int64_t whole = n - n % kRereadBlock;
  for (std::int64_t i = 0; i < whole; i += kRereadBlock) {
    count_block(converted(static_cast<const T*>(x) + i, kRereadBlock, buffer), seen, counts, scratch.counters);
  }
  range.merge(fold(seen.extremes));
  for (int j = 0; j < kFloats; ++j) {
    scratch.negative_zeros += static_cast<std::uint32_t>(seen.negative_zeros[j]);
    scratch.low_bits |= seen.bits[j];
  }
  const float* rest = converted(static_cast<const T*>(x) + whole, n - whole, buffer);
  observe_run(rest, n - whole, range, counts);
  for (std::int64_t i = 0; i < n - whole; ++i) {
    const std::uint32_t bits = word_of(rest[i]);
    ++scratch.counters[i % kCopies * kStride + (bits >> kSketchShift)];
    scratch.negative_zeros += bits == kNegativeZero;
    if (is_finite(rest[i])) scratch.low_bits |= bits;
  }
}

// Adds bins [begin, end) of all copies to the sketch and clears them.
void flush_bins(std::uint16_t* counters, int begin, int end, std::int64_t* sketch) {
  for (int bin = begin; bin < end; ++bin) {
    std::uint32_t sum = 0;
    for (int copy = 0; copy < kCopies; ++copy) sum += counters[copy * kStride + bin];
    sketch[bin] += sum;
  }
  for (int copy = 0; copy < kCopies; ++copy) {
    std::memset(counters + copy * kStride + begin, 0, static_cast<std::size_t>(end - begin) * sizeof *counters);
  }
}

void flush(SketchScratch& scratch, FiniteRange range, Sketch sketch) {
  const bool positive = range.highest > 0, negative = range.lowest < 0;
  flush_bins(scratch.counters, 0, positive ? sketch_bin(word_of(range.highest)) + 1 : 1, sketch.counts);
  flush_bins(scratch.counters, kSketchSide, negative ? sketch_bin(word_of(range.lowest)) + 1 : kSketchSide + 1,
             sketch.counts);
  sketch.counts[kSketchSide] -= scratch.negative_zeros;
  sketch.counts[0] += scratch.negative_zeros;
  *sketch.low_bits |= static_cast<std::int32_t>(scratch.low_bits & kLowBits);
  scratch.negative_zeros = scratch.low_bits = 0;
  for (int copy = 0; copy < kCopies; ++copy) {
    std::uint16_t* end = scratch.counters + copy * kStride + kSketchSide;
    for (int bin = -kNonFiniteBins; bin < 0; ++bin) end[bin] = end[kSketchSide + bin] = 0;
  }
}

}  // namespace

namespace QSIM_LEVEL {
const ObserveKernels observe_kernels = {by_element<ObserveDirectly>([]<class T>() { return observe_directly<T>; }),
                                        by_element<CountSketch>([]<class T>() { return count<T>; }), flush};
}  // namespace QSIM_LEVEL

}  // namespace qsim::cpu
