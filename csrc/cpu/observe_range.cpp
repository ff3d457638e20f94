#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "cpu/observe_state.h"
#include "cpu/subnormals.h"
#include "observe.h"

namespace qsim {
namespace {

// One kind of input, its kernel and the state it extends.
struct Observation {
  const char* x;
  std::int64_t element_size;
  cpu::ObserveRange kernel;
  float *lowest, *highest;

  void operator()(std::int64_t offset, RangeLayout part, float* low, float* high, NonFinite& counts) const {
    kernel(x + offset * element_size, part.outer, part.ranges, part.inner, low, high, counts);
  }
};

std::int64_t grain(std::int64_t elements_per_item) { return std::max<std::int64_t>(1, kGrain / elements_per_item); }

// Tasks take runs of the outer * ranges rows. Unless there is one row a range, each has ranges of its own, merged at
// the end.
NonFinite observe_rows(const Observation& observe, RangeLayout layout) {
  const auto [outer, ranges, inner, block] = layout;
  NonFinite total;
  std::mutex merging;
  parallel_for(
      0, outer * ranges, grain(inner), [&, outer = outer, ranges = ranges, inner = inner](auto begin, auto end) {
        NonFinite counts;
        const bool own = outer > 1;
        std::vector<float> low(own ? ranges : 0, INFINITY), high(own ? ranges : 0, -INFINITY);
        float* lowest = own ? low.data() : observe.lowest;
        float* highest = own ? high.data() : observe.highest;
        for (std::int64_t row = begin; row < end;) {
          const std::int64_t r = row % ranges, whole = r == 0 ? (end - row) / ranges : 0;
          const RangeLayout part =
              whole > 0 ? RangeLayout{whole, ranges, inner} : RangeLayout{1, std::min(end - row, ranges - r), inner};
          observe(row * inner, part, lowest + r, highest + r, counts);
          row += part.outer * part.ranges;
        }
        const std::lock_guard lock(merging);
        total.merge(counts);
        for (std::int64_t r = 0; own && r < ranges; ++r) {
          FiniteRange range{observe.lowest[r], observe.highest[r]};
          range.merge({low[r], high[r]});
          observe.lowest[r] = range.lowest;
          observe.highest[r] = range.highest;
        }
      });
  return total;
}

NonFinite observe_blocks(const Observation& observe, RangeLayout layout) {
  const auto [outer, size, inner, block] = layout;
  const std::int64_t blocks = (size + block - 1) / block;
  NonFinite total;
  std::mutex merging;
  parallel_for(0, outer * blocks, grain(block * inner),
               [&, size = size, inner = inner, block = block](auto begin, auto end) {
                 NonFinite counts;
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t first = i % blocks * block, length = std::min(block, size - first);
                   observe((i / blocks * size + first) * inner, {length, inner, 1}, observe.lowest + i * inner,
                           observe.highest + i * inner, counts);
                 }
                 const std::lock_guard lock(merging);
                 total.merge(counts);
               });
  return total;
}

void observe_range_cpu(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest,
                       const at::Tensor& counts, std::optional<std::int64_t> axis,
                       std::optional<std::int64_t> block_size) {
  const KeepSubnormals guard;
  check_observe_range(x, lowest, highest, counts, axis, block_size);
  if (x.numel() == 0) return;
  const at::Tensor source = block_size ? x.contiguous() : dense(x);
  const RangeLayout layout = range_layout(source, axis, block_size);
  const Observation observe{static_cast<const char*>(source.const_data_ptr()), source.element_size(),
                            cpu::observe_range_kernels().of[static_cast<int>(element_of(x))],
                            lowest.mutable_data_ptr<float>(), highest.mutable_data_ptr<float>()};
  add_counts(counts, x.numel(), layout.block > 0 ? observe_blocks(observe, layout) : observe_rows(observe, layout));
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("observe_range_", observe_range_cpu); }
}  // namespace qsim
