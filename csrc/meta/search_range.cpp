#include "search_range.h"

#include <torch/library.h>

#include "search_range_data.h"

namespace qsim {
namespace {

std::tuple<at::Tensor, at::Tensor> search_range_meta(const at::Tensor& lowest, const at::Tensor& highest,
                                                     const at::Tensor& sketch, std::int64_t quant_min,
                                                     std::int64_t quant_max, bool symmetric, std::string_view method,
                                                     double percentile, double gamma,
                                                     const std::optional<at::Tensor>& low_bits) {
  range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  return empty_ranges(lowest, highest, sketch, low_bits);
}

std::tuple<at::Tensor, at::Tensor> search_range_data_meta(const at::Tensor& x, std::int64_t quant_min,
                                                          std::int64_t quant_max, std::optional<std::int64_t> axis,
                                                          std::optional<std::int64_t> block_size, bool symmetric,
                                                          std::string_view method, double percentile, double gamma) {
  range_search(quant_min, quant_max, symmetric, method, percentile, gamma);
  return empty_data_ranges(x, data_range_shape(x, axis, block_size));
}

RangeLists search_range_weights_meta(at::TensorList weights, at::IntArrayRef quant_min, at::IntArrayRef quant_max,
                                     const c10::List<bool>& symmetric,
                                     const c10::List<std::optional<std::int64_t>>& axis,
                                     const c10::List<std::optional<std::int64_t>>& block_size, std::string_view method,
                                     double percentile, double gamma) {
  const WeightSearches searches{weights, quant_min, quant_max, symmetric, axis, block_size, method, percentile, gamma};
  searches.check();
  RangeLists lists;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    searches.search(i);
    auto [min, max] = empty_data_ranges(weights[i], data_range_shape(weights[i], axis[i], block_size[i]));
    std::get<0>(lists).push_back(std::move(min));
    std::get<1>(lists).push_back(std::move(max));
  }
  return lists;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("search_range", search_range_meta);
  m.impl("search_range_data", search_range_data_meta);
  m.impl("search_range_weights", search_range_weights_meta);
}
}  // namespace qsim
