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
void observe_directly(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, std::int64_t* sketch) {
  float buffer[kBlock];
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t size = n - i < kBlock ? n - i : kBlock;
    const float* block = as_floats(static_cast<const T*>(x) + i, size, buffer);
    observe_run(block, size, range, counts);
    for (std::int64_t j = 0; j < size; ++j) {
      if (is_finite(block[j])) ++sketch[sketch_bin(bits_of(block[j]))];
    }
  }
}

// All bins alike, so that the time does not depend on the data: what is not finite lands in bins that `flush` drops.
QSIM_INLINE void count_block(const float* x, std::int64_t n, std::uint32_t* counters) {
  constexpr int kStride = SketchScratch::kStride;
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {  // 64-bit loads: two elements each, half of the load instructions
    const std::uint64_t a = load_as<std::uint64_t>(x + i), b = load_as<std::uint64_t>(x + i + 2);
    ++counters[(a >> kSketchShift) & (kSketchBins - 1)];
    ++counters[kStride + (a >> (32 + kSketchShift))];
    ++counters[2 * kStride + ((b >> kSketchShift) & (kSketchBins - 1))];
    ++counters[3 * kStride + (b >> (32 + kSketchShift))];
  }
  for (; i < n; ++i) ++counters[bits_of(x[i]) >> kSketchShift];
}

QSIM_INLINE std::uint32_t negative_zeros(const float* x, std::int64_t n) {
  Ints found{};
  std::int64_t i = 0;
  for (; n - i >= kWidth; i += kWidth) found -= load_as<Words>(x + i) == kNegativeZero;
  std::uint32_t total = 0;
  for (; i < n; ++i) total += bits_of(x[i]) == kNegativeZero;
  for (int j = 0; j < kWidth; ++j) total += static_cast<std::uint32_t>(found[j]);
  return total;
}

template <class T>
void count(const void* x, std::int64_t n, FiniteRange& range, NonFinite& counts, SketchScratch& scratch) {
  float buffer[kBlock];
  Lanes<kChains> lanes;
  std::uint32_t zeros = 0;
  const std::int64_t blocks = n / kBlock;
  for (std::int64_t i = 0; i < blocks * kBlock; i += kBlock) {
    const float* block = as_floats(static_cast<const T*>(x) + i, kBlock, buffer);
    extend_block(lanes, block, kBlock, counts);
    zeros += negative_zeros(block, kBlock);
    count_block(block, kBlock, scratch.counters);
  }
  range.merge(fold(lanes));
  const float* rest = as_floats(static_cast<const T*>(x) + blocks * kBlock, n % kBlock, buffer);
  observe_run(rest, n % kBlock, range, counts);
  zeros += negative_zeros(rest, n % kBlock);
  count_block(rest, n % kBlock, scratch.counters);
  // The copies are summed modulo 2^32: the first may become "negative".
  scratch.counters[kNegativeZero >> kSketchShift] -= zeros;
  scratch.counters[0] += zeros;
}

// Adds bins [begin, end) of all copies to the sketch and clears them.
void flush_bins(std::uint32_t* counters, int begin, int end, std::int64_t* sketch) {
  constexpr int kStride = SketchScratch::kStride;
  for (int bin = begin; bin < end; ++bin) {
    std::uint32_t* copy = counters + bin;
    sketch[bin] += copy[0] + copy[kStride] + copy[2 * kStride] + copy[3 * kStride];
    copy[0] = copy[kStride] = copy[2 * kStride] = copy[3 * kStride] = 0;
  }
}

void flush(SketchScratch& scratch, FiniteRange range, std::int64_t* sketch) {
  const bool positive = range.highest > 0, negative = range.lowest < 0;
  flush_bins(scratch.counters, 0, positive ? sketch_bin(bits_of(range.highest)) + 1 : 1, sketch);
  flush_bins(scratch.counters, kSketchSide, negative ? sketch_bin(bits_of(range.lowest)) + 1 : kSketchSide + 1, sketch);
  for (int copy = 0; copy < SketchScratch::kCopies; ++copy) {
    std::uint32_t* end = scratch.counters + copy * SketchScratch::kStride + kSketchSide;
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
