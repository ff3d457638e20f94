#include "qsim/observe.h"

#include "finite_lanes.h"

namespace qsim::cpu {

namespace {

QSIM_INLINE std::uint32_t bits_of(float x) { return load_as<std::uint32_t>(&x); }

// Elements as float32 in memory: float32 input is read in place, other types through `buffer`.
QSIM_INLINE const float* as_floats(const float* x, std::int64_t, float*) { return x; }

template <class T>
QSIM_INLINE const float* as_floats(const T* x, std::int64_t n, float* buffer) {
  const std::int64_t whole = n - n % kWidth;
  for (std::int64_t i = 0; i < whole; i += kWidth) store(buffer + i, load(x + i));
  for (std::int64_t i = whole; i < n; ++i) buffer[i] = load_one(x + i);
  return buffer;
}

template <class T>
void observe_directly(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, Sketch sketch) {
  float buffer[kBlock];
  std::uint32_t low_bits = 0;
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t size = n - i < kBlock ? n - i : kBlock;
    const float* block = as_floats(static_cast<const T*>(x) + i, size, buffer);
    observe_run(block, size, range, counts);
    for (std::int64_t j = 0; j < size; ++j) {
      if (!is_finite(block[j])) continue;
      const std::uint32_t bits = bits_of(block[j]);
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
  Lanes<1> lanes;  // a vector arrives every kWidth cycles: no chain waits
  Ints negative_zeros{};
  Words bits{};  // ORed
};

QSIM_INLINE Words bits_of_finite(const float* x) {
  Words all_bits{};
  for (std::int64_t i = 0; i < kBlock; i += kWidth) {
    const Words bits = load_as<Words>(x + i);
    all_bits |= bits & (Words)((bits & 0x7f800000) != 0x7f800000);
  }
  return all_bits;
}

// kBlock elements. Counting is bound by the one store that the processor makes in a cycle: the range is found in
// between, in the slots that are left.
QSIM_INLINE void count_block(const float* x, Seen& seen, NonFinite& counts, std::uint16_t* counters) {
  Lanes<1> next = seen.lanes;
  Sums<1> sums;
  Words bits = seen.bits;
  for (std::int64_t i = 0; i < kBlock; i += kStep) {
#pragma GCC unroll 4
    for (int j = 0; j < kChains; ++j) {
      const float* part = x + i + j * kWidth;
      const Floats vector = load(part);
      extend(next, sums, 0, vector);
      bits |= (Words)vector;
      seen.negative_zeros -= (Words)vector == kNegativeZero;
#pragma GCC unroll 8
      for (int k = 0; k < kWidth; k += 2) count_pair(part + k, counters + (j * kWidth + k) % kCopies * kStride);
    }
  }
  if (finite(next, sums)) [[likely]] {
    seen.lanes = next;
    seen.bits = bits;
  } else {
    seen.bits |= bits_of_finite(x);
    extend_block_finite(seen.lanes, x, kBlock, counts);
  }
}

template <class T>
void count(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, SketchScratch& scratch) {
  float buffer[kBlock];
  Seen seen;
  const std::int64_t whole = n - n % kBlock;
  for (std::int64_t i = 0; i < whole; i += kBlock) {
    count_block(as_floats(static_cast<const T*>(x) + i, kBlock, buffer), seen, counts, scratch.counters);
  }
  range.merge(fold(seen.lanes));
  for (int j = 0; j < kWidth; ++j) {
    scratch.negative_zeros += static_cast<std::uint32_t>(seen.negative_zeros[j]);
    scratch.low_bits |= seen.bits[j];
  }
  const float* rest = as_floats(static_cast<const T*>(x) + whole, n - whole, buffer);
  observe_run(rest, n - whole, range, counts);
  for (std::int64_t i = 0; i < n - whole; ++i) {
    const std::uint32_t bits = bits_of(rest[i]);
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
  flush_bins(scratch.counters, 0, positive ? sketch_bin(bits_of(range.highest)) + 1 : 1, sketch.counts);
  flush_bins(scratch.counters, kSketchSide, negative ? sketch_bin(bits_of(range.lowest)) + 1 : kSketchSide + 1,
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
const ObserveKernels observe_kernels = {
    {observe_directly<float>, observe_directly<Float16>, observe_directly<BFloat16>, observe_directly<double>},
    {count<float>, count<Float16>, count<BFloat16>, count<double>},
    flush};
}

}  // namespace qsim::cpu
