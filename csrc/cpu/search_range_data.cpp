#include "search_range_data.h"

#include <torch/library.h>

#include <memory>

#include "cpu/subnormals.h"

namespace qsim {
namespace {

// Threads share the values of all tensors, laid end to end; a range is searched by the one whose share it starts in.
void search_all(const std::vector<DataRows>& tensors) {
  constexpr std::int64_t kValuesPerThread = 4096;
  const auto& kernels = cpu::search_range_data_kernels();
  std::vector<std::int64_t> first{0};  // of each tensor's values
  std::size_t bytes = 0;
  for (const DataRows& rows : tensors) {
    first.push_back(first.back() + rows.values.numel());
    const Element element = element_of(rows.values);
    bytes = std::max(bytes, kernels.workspace_bytes(element, std::min(rows.block, rows.length), rows.search.method));
  }
  parallel_for(0, first.back(), kValuesPerThread, [&](std::int64_t begin, std::int64_t end) {
    const std::unique_ptr<std::byte[]> workspace(new std::byte[bytes]);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const DataRows& rows = tensors[t];
      const auto& [min, max] = rows.ranges;
      const std::int64_t n = rows.values.numel(), width = rows.values.element_size(), step = min.element_size();
      const auto* x = static_cast<const char*>(rows.values.const_data_ptr());
      auto* low = static_cast<char*>(min.data_ptr());
      auto* high = static_cast<char*>(max.data_ptr());
      const auto run = kernels.run[static_cast<int>(element_of(rows.values))];
      const std::int64_t last = rows.first_from(std::clamp<std::int64_t>(end - first[t], 0, n));
      for (std::int64_t i = rows.first_from(std::clamp<std::int64_t>(begin - first[t], 0, n)); i < last; ++i) {
        run(x + rows.start(i) * width, rows.size(i), rows.search, workspace.get(), low + i * step, high + i * step);
      }
    }
  });
}

Ranges search_range_data_cpu(const at::Tensor& x, std::int64_t quant_min, std::int64_t quant_max,
                             std::optional<std::int64_t> axis, std::optional<std::int64_t> block_size, bool symmetric,
                             std::string_view method, double percentile, double gamma) {
  const KeepSubnormals guard;
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  const std::vector<DataRows> rows{data_rows(x, axis, block_size, search)};
  search_all(rows);
  return rows[0].finished();
}

RangeLists search_range_weights_cpu(at::TensorList weights, at::IntArrayRef quant_min, at::IntArrayRef quant_max,
                                    const c10::List<bool>& symmetric,
                                    const c10::List<std::optional<std::int64_t>>& axis,
                                    const c10::List<std::optional<std::int64_t>>& block_size, std::string_view method,
                                    double percentile, double gamma) {
  const KeepSubnormals guard;
  const std::vector<DataRows> rows =
      WeightSearches{weights, quant_min, quant_max, symmetric, axis, block_size, method, percentile, gamma}.rows();
  search_all(rows);
  return finished(rows);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("search_range_data", search_range_data_cpu);
  m.impl("search_range_weights", search_range_weights_cpu);
}
}  // namespace qsim
