#include "observe.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "cpu/observe_state.h"

namespace qsim {
namespace {

constexpr std::int64_t kDirect = 4096;             // up to here flushing the scratch would cost more than it saves
constexpr std::int64_t kMostPerFlush = 1LL << 30;  // the scratch counts in 32 bits

// 280 KB, zero between uses, kept by each thread that has observed something.
cpu::SketchScratch& scratch_of_this_thread() {
  static thread_local const auto scratch = std::make_unique<cpu::SketchScratch>();
  return *scratch;
}

void observe_cpu(const at::Tensor& x, const at::Tensor& lowest, const at::Tensor& highest, const at::Tensor& counts,
                 const at::Tensor& sketch) {
  check_range_state(x, lowest, highest, counts, {}, {});
  check_sketch(x, sketch);
  const at::Tensor source = dense(x);
  const std::int64_t n = source.numel();
  const auto& kernels = cpu::observe_kernels();
  const int element = static_cast<int>(element_of(x));
  const char* data = static_cast<const char*>(source.const_data_ptr());
  auto* bins = sketch.mutable_data_ptr<std::int64_t>();
  FiniteRange range;
  NonFinite found;
  if (n <= kDirect) {
    kernels.directly[element](data, n, range, found, bins);
  } else {
    std::mutex merging;
    at::parallel_for(0, n, 2 * kGrain, [&](std::int64_t begin, std::int64_t end) {
      cpu::SketchScratch& scratch = scratch_of_this_thread();
      for (std::int64_t i = begin; i < end; i += kMostPerFlush) {
        FiniteRange part;
        NonFinite others;
        kernels.count[element](data + i * source.element_size(), std::min(kMostPerFlush, end - i), part, others,
                               scratch);
        const std::lock_guard lock(merging);
        kernels.flush(scratch, part, bins);
        range.merge(part);
        found.merge(others);
      }
    });
  }
  extend_range(lowest, highest, range);
  add_counts(counts, n, found);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("observe_", observe_cpu); }
}  // namespace qsim
