#include "search_range.h"

#include <torch/library.h>

#include <memory>

#include "cpu/subnormals.h"

namespace qsim {
namespace {

// 900 KB of which a search touches some 150, kept by each thread that has searched: fresh pages cost as much as the
// search.
void* workspace_of_this_thread() {
  static thread_local const std::unique_ptr<std::byte[]> workspace(
      new std::byte[cpu::search_range_kernels().workspace_bytes]);
  return workspace.get();
}

std::tuple<at::Tensor, at::Tensor> search_range_cpu(const at::Tensor& lowest, const at::Tensor& highest,
                                                    const at::Tensor& sketch, std::int64_t quant_min,
                                                    std::int64_t quant_max, bool symmetric, std::string_view method,
                                                    double percentile, double gamma,
                                                    const std::optional<at::Tensor>& low_bits) {
  const KeepSubnormals guard;
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  auto [min, max] = empty_ranges(lowest, highest, sketch, low_bits);
  const at::Tensor low = lowest.contiguous(), high = highest.contiguous(), counts = sketch.contiguous();
  const auto* seen_low = low.const_data_ptr<float>();
  const auto* seen_high = high.const_data_ptr<float>();
  const auto* bins = counts.const_data_ptr<std::int64_t>();
  const at::Tensor bits = low_bits ? low_bits->contiguous() : at::Tensor();
  const auto* seen_bits = low_bits ? bits.const_data_ptr<std::int32_t>() : nullptr;
  auto* chosen_low = min.mutable_data_ptr<float>();
  auto* chosen_high = max.mutable_data_ptr<float>();
  const auto& kernels = cpu::search_range_kernels();
  parallel_for(0, low.numel(), 1, [&](std::int64_t begin, std::int64_t end) {
    void* workspace = workspace_of_this_thread();
    for (std::int64_t i = begin; i < end; ++i) {
      const auto lattice = seen_bits ? static_cast<std::uint32_t>(seen_bits[i]) : kUnknownBits;
      kernels.run(seen_low[i], seen_high[i], bins + i * kSketchBins, lattice, search, workspace, chosen_low + i,
                  chosen_high + i);
    }
  });
  return {min, max};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("search_range", search_range_cpu); }
}  // namespace qsim
