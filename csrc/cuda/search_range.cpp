#include "search_range.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/search_range.h"
#include "search_range_data.h"

namespace qsim {
namespace {

at::Tensor workspace_of(std::size_t bytes, const at::Tensor& like) {
  return at::empty({static_cast<std::int64_t>(bytes)}, like.options().dtype(at::kByte));
}

Ranges search_range_cuda(const at::Tensor& lowest, const at::Tensor& highest, const at::Tensor& sketch,
                         std::int64_t quant_min, std::int64_t quant_max, bool symmetric, std::string_view method,
                         double percentile, double gamma, const std::optional<at::Tensor>& low_bits) {
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  const c10::cuda::CUDAGuard guard(lowest.device());
  auto [min, max] = empty_ranges(lowest, highest, sketch, low_bits);
  const at::Tensor low = lowest.contiguous(), high = highest.contiguous(), counts = sketch.contiguous();
  const at::Tensor bits = low_bits ? low_bits->contiguous() : at::Tensor();
  const at::Tensor workspace = workspace_of(cuda::search_range_workspace_bytes(low.numel()), low);
  check_launch(cuda::search_range(
      low.const_data_ptr<float>(), high.const_data_ptr<float>(), counts.const_data_ptr<std::int64_t>(),
      low_bits ? bits.const_data_ptr<std::int32_t>() : nullptr, low.numel(), search, workspace.mutable_data_ptr(),
      min.mutable_data_ptr<float>(), max.mutable_data_ptr<float>(), current_stream()));
  return {min, max};
}

// Those of one element type in the same launches (of up to DataTable::kMost tensors).
void search_all(const std::vector<DataRows>& tensors) {
  for (const Element element : {Element::f32, Element::f16, Element::bf16, Element::f64}) {
    std::vector<const DataRows*> alike;
    for (const DataRows& rows : tensors) {
      if (rows.values.numel() > 0 && element_of(rows.values) == element) alike.push_back(&rows);
    }
    constexpr std::size_t kMost = cuda::DataTable::kMost;
    for (std::size_t begin = 0; begin < alike.size(); begin += kMost) {
      cuda::DataTable table;
      table.tensors = static_cast<int>(std::min(kMost, alike.size() - begin));
      table.first_range[0] = 0;
      for (int t = 0; t < table.tensors; ++t) {
        const DataRows& rows = *alike[begin + t];
        const auto& [min, max] = rows.ranges;
        table.data[t] = rows.values.const_data_ptr();
        table.length[t] = rows.length;
        table.block[t] = rows.block;
        table.first_range[t + 1] = table.first_range[t] + min.numel();
        table.low[t] = min.data_ptr();
        table.high[t] = max.data_ptr();
        table.grid[t] = rows.search.grid;
      }
      const RangeSearch& search = alike[begin]->search;  // but for the grid the same for all
      const std::size_t bytes = cuda::search_range_data_workspace_bytes(table, search.method);
      const at::Tensor workspace = workspace_of(bytes, alike[begin]->values);
      check_launch(cuda::search_range_data(table, element, search, workspace.mutable_data_ptr(), current_stream()));
    }
  }
}

Ranges search_range_data_cuda(const at::Tensor& x, std::int64_t quant_min, std::int64_t quant_max,
                              std::optional<std::int64_t> axis, std::optional<std::int64_t> block_size, bool symmetric,
                              std::string_view method, double percentile, double gamma) {
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  const c10::cuda::CUDAGuard guard(x.device());
  const std::vector<DataRows> rows{data_rows(x, axis, block_size, search)};
  search_all(rows);
  return rows[0].finished();
}

RangeLists search_range_weights_cuda(at::TensorList weights, at::IntArrayRef quant_min, at::IntArrayRef quant_max,
                                     const c10::List<bool>& symmetric,
                                     const c10::List<std::optional<std::int64_t>>& axis,
                                     const c10::List<std::optional<std::int64_t>>& block_size, std::string_view method,
                                     double percentile, double gamma) {
  const WeightSearches searches{weights, quant_min, quant_max, symmetric, axis, block_size, method, percentile, gamma};
  const c10::cuda::OptionalCUDAGuard guard(weights.empty() ? std::nullopt : std::optional(weights[0].device()));
  const std::vector<DataRows> rows = searches.rows();
  search_all(rows);
  return finished(rows);
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("search_range", search_range_cuda);
  m.impl("search_range_data", search_range_data_cuda);
  m.impl("search_range_weights", search_range_weights_cuda);
}
}  // namespace qsim
