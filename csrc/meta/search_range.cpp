#include "search_range.h"

#include <torch/library.h>

#include "search_range_data.h"

namespace qsim {
namespace {

std::tuple<at::Tensor, at::Tensor> search_range_meta(const at::Tensor& lowest, const at::Tensor& highest,
                                                     const at::Tensor& sketch, std::int64_t quant_min,
                                                     std::int64_t quant_max, bool symmetric, std::string_view method,
                                                     double percentile, double gamma) {
  range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  return empty_ranges(lowest, highest, sketch);
}

std::tuple<at::Tensor, at::Tensor> search_range_data_meta(const at::Tensor& x, std::int64_t quant_min,
                                                          std::int64_t quant_max, std::optional<std::int64_t> axis,
                                                          std::optional<std::int64_t> block_size, bool symmetric,
                                                          std::string_view method, double percentile, double gamma) {
  range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  return empty_data_ranges(x, data_range_shape(x, axis, block_size));
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("search_range", search_range_meta);
  m.impl("search_range_data", search_range_data_meta);
}
}  // namespace qsim
