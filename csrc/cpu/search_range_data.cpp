#include "search_range_data.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

namespace qsim {
namespace {

// Rows of `length` consecutive values, each cut into blocks of `block` (the last of a row may be short).
struct Rows {
  std::int64_t length, block;

  std::int64_t blocks() const { return std::max<std::int64_t>((length + block - 1) / block, 1); }
};

template <class T, class Kernel>
void search_rows(Kernel kernel, const at::Tensor& values, Rows rows, const RangeSearch& search, at::Tensor& min,
                 at::Tensor& max) {
  const T* x = values.const_data_ptr<T>();
  T* low = min.mutable_data_ptr<T>();
  T* high = max.mutable_data_ptr<T>();
  const std::size_t bytes = cpu::search_range_data_kernels().workspace_bytes;
  at::parallel_for(0, min.numel(), 1, [&](std::int64_t begin, std::int64_t end) {
    const std::unique_ptr<std::byte[]> workspace(new std::byte[bytes]);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t start = i % rows.blocks() * rows.block;
      const std::int64_t length = std::min(rows.block, rows.length - start);
      kernel(x + i / rows.blocks() * rows.length + start, length, search, workspace.get(), low + i, high + i);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> search_range_data_cpu(const at::Tensor& x, std::int64_t quant_min,
                                                         std::int64_t quant_max, std::optional<std::int64_t> axis,
                                                         std::optional<std::int64_t> block_size, bool symmetric,
                                                         std::string_view method, double percentile, double gamma) {
  const RangeSearch search = range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  std::vector<std::int64_t> shape = data_range_shape(x, axis, block_size);
  at::Tensor values = x.to(data_range_type(x));
  Rows rows{x.numel(), std::max<std::int64_t>(x.numel(), 1)};
  if (axis && block_size) {  // blocks become consecutive: their axis last, in the ranges too
    const std::int64_t dim = c10::maybe_wrap_dim(*axis, x.dim());
    values = values.movedim(dim, -1);
    rows = {x.size(dim), *block_size};
    shape.push_back(shape[dim]);
    shape.erase(shape.begin() + dim);
  } else if (axis) {
    values = values.movedim(*axis, 0);
    const std::int64_t length = values.size(0) == 0 ? 0 : values.numel() / values.size(0);
    rows = {length, std::max<std::int64_t>(length, 1)};
  }
  values = values.contiguous();
  auto [min, max] = empty_data_ranges(x, shape);
  const auto& kernels = cpu::search_range_data_kernels();
  if (values.scalar_type() == at::kDouble) {
    search_rows<double>(kernels.f64, values, rows, search, min, max);
  } else {
    search_rows<float>(kernels.f32, values, rows, search, min, max);
  }
  if (axis && block_size) return {min.movedim(-1, *axis).contiguous(), max.movedim(-1, *axis).contiguous()};
  return {min, max};
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) { m.impl("search_range_data", search_range_data_cpu); }
}  // namespace qsim
