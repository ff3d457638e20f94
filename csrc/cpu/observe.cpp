#include "observe.h"

#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "cpu/observe_state.h"
#include "cpu/subnormals.h"

namespace qsim {
namespace {

constexpr std::int64_t kDirect = 4096;  // up to here flushing the scratch would cost more than it saves

// 280 KB, zero between uses, kept by each thread that has observed something.
cpu::SketchScratch& scratch_of_this_thread() {
  static thread_local const auto scratch = std::make_unique<cpu::SketchScratch>();
  return *scratch;
}

void observe_cpu(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest, const at::Tensor& counts,
                 const at::Tensor& sketch, const at::Tensor& low_bits) {
  const KeepSubnormals guard;
  check_observe(x, lowest, highest, counts, sketch, low_bits);
  const at::Tensor source = dense(x);
  const std::int64_t n = source.numel();
  const auto& kernels = cpu::observe_kernels();
  const int element = static_cast<int>(element_of(x));
  const char* data = static_cast<const char*>(source.const_data_ptr());
  const Sketch seen{sketch.mutable_data_ptr<std::int64_t>(), low_bits.mutable_data_ptr<std::int32_t>()};
  FiniteRange range;
  NonFinite found;
  std::mutex merging;
  parallel_for(0, n, 2 * kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += cpu::SketchScratch::kMost) {
      const std::int64_t length = std::min(cpu::SketchScratch::kMost, end - i);
      const char* part = data + i * source.element_size();
      if (length <= kDirect) {
        const std::lock_guard lock(merging);
        kernels.directly[element](part, length, range, found, seen);
        break;
      }
      cpu::SketchScratch& scratch = scratch_of_this_thread();
      FiniteRange part_range;
      NonFinite others;
      kernels.count[element](part, length, part_range, others, scratch);
      const std::lock_guard lock(merging);
      kernels.flush(scratch, part_range, seen);
      range.merge(part_range);
      found.merge(others);
    }
  });
  extend_range(lowest, highest, range);
  add_counts(counts, n, found);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("observe_", observe_cpu); }
}  // namespace qsim
