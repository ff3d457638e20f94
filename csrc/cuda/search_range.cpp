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
                         double percentile, double gamma) {
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  const c10::cuda::CUDAGuard guard(lowest.device());
  auto [min, max] = empty_ranges(lowest, highest, sketch);
  const at::Tensor low = lowest.contiguous(), high = highest.contiguous(), counts = sketch.contiguous();
  const at::Tensor workspace = workspace_of(cuda::search_range_workspace_bytes(low.numel()), low);
  check_launch(cuda::search_range(low.const_data_ptr<float>(), high.const_data_ptr<float>(),
                                  counts.const_data_ptr<std::int64_t>(), low.numel(), search,
                                  workspace.mutable_data_ptr(), min.mutable_data_ptr<float>(),
                                  max.mutable_data_ptr<float>(), current_stream()));
  return {min, max};
}

template <class T>
void search_rows(const DataRows& rows, const RangeSearch& search) {
  const auto& [min, max] = rows.ranges;
  const std::int64_t count = min.numel();
  const at::Tensor workspace = workspace_of(cuda::search_range_data_workspace_bytes(count, search.method), min);
  check_launch(cuda::search_range_data(rows.values.const_data_ptr<T>(), rows.length, rows.block, count, search,
                                       workspace.mutable_data_ptr(), min.mutable_data_ptr<T>(),
                                       max.mutable_data_ptr<T>(), current_stream()));
}

Ranges search_range_data_cuda(const at::Tensor& x, std::int64_t quant_min, std::int64_t quant_max,
                              std::optional<std::int64_t> axis, std::optional<std::int64_t> block_size, bool symmetric,
                              std::string_view method, double percentile, double gamma) {
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  const c10::cuda::CUDAGuard guard(x.device());
  const DataRows rows = data_rows(x, axis, block_size);
  if (rows.values.scalar_type() == at::kDouble) {
    search_rows<double>(rows, search);
  } else {
    search_rows<float>(rows, search);
  }
  return rows.finished();
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("search_range", search_range_cuda);
  m.impl("search_range_data", search_range_data_cuda);
}
}  // namespace qsim
