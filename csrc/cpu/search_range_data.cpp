#include "search_range_data.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <memory>

namespace qsim {
namespace {

template <class T, class Kernel>
void search_rows(Kernel kernel, const DataRows& rows, const RangeSearch& search) {
  const auto& [min, max] = rows.ranges;
  const T* x = rows.values.const_data_ptr<T>();
  T* low = min.mutable_data_ptr<T>();
  T* high = max.mutable_data_ptr<T>();
  const std::size_t bytes = cpu::search_range_data_kernels().workspace_bytes;
  at::parallel_for(0, min.numel(), 1, [&](std::int64_t begin, std::int64_t end) {
    const std::unique_ptr<std::byte[]> workspace(new std::byte[bytes]);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t start = i % rows.blocks() * rows.block;
      const std::int64_t n = std::min(rows.block, rows.length - start);
      kernel(x + i / rows.blocks() * rows.length + start, n, search, workspace.get(), low + i, high + i);
    }
  });
}

Ranges search_range_data_cpu(const at::Tensor& x, std::int64_t quant_min, std::int64_t quant_max,
                             std::optional<std::int64_t> axis, std::optional<std::int64_t> block_size, bool symmetric,
                             std::string_view method, double percentile, double gamma) {
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  const DataRows rows = data_rows(x, axis, block_size);
  const auto& kernels = cpu::search_range_data_kernels();
  if (rows.values.scalar_type() == at::kDouble) {
    search_rows<double>(kernels.f64, rows, search);
  } else {
    search_rows<float>(kernels.f32, rows, search);
  }
  return rows.finished();
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("search_range_data", search_range_data_cpu); }
}  // namespace qsim
