// What the CPU, CUDA and Meta kernels of search_range and search_range_data check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "choose_qparams.h"
#include "qsim/search_range.h"
#include "qsim/sketch.h"

namespace qsim {

inline RangeMethod range_method(std::string_view name) {
  for (const RangeMethod method : kAll<RangeMethod>) {
    if (name == name_of(method)) return method;
  }
  std::string known;
  for (const RangeMethod method : kAll<RangeMethod>) {
    known += method == kAll<RangeMethod>.front() ? "" : method == kAll<RangeMethod>.back() ? " or " : ", ";
    known += name_of(method);
  }
  TORCH_CHECK_VALUE(false, "qsim: method is \"", name, "\"; expected ", known);
}

inline RangeSearch range_search(std::int64_t quant_min, std::int64_t quant_max, bool symmetric, std::string_view method,
                                double percentile, double gamma) {
  TORCH_CHECK_VALUE(percentile > 0 && percentile <= 100, "qsim: percentile is ", percentile,
                    "; expected more than 0 and at most 100");
  TORCH_CHECK_VALUE(gamma >= 0 && gamma <= 1e6, "qsim: gamma is ", gamma, "; expected between 0 and 1e6");
  const RangeMethod chosen = range_method(method);
  return {quant_grid(quant_min, quant_max, symmetric), chosen, percentile, chosen == RangeMethod::mse ? 1.0 : gamma};
}

inline std::tuple<at::Tensor, at::Tensor> empty_ranges(const at::Tensor& lowest, const at::Tensor& highest,
                                                       const at::Tensor& sketch,
                                                       const std::optional<at::Tensor>& low_bits) {
  TORCH_CHECK_TYPE(
      lowest.scalar_type() == at::kFloat && highest.scalar_type() == at::kFloat && sketch.scalar_type() == at::kLong,
      "qsim::search_range: lowest is ", described(lowest.scalar_type()), ", highest ", described(highest.scalar_type()),
      " and sketch ", described(sketch.scalar_type()), "; expected float32, float32 and int64");
  TORCH_CHECK_VALUE(lowest.dim() <= 1 && lowest.sizes() == highest.sizes(), "qsim::search_range: lowest has shape ",
                    lowest.sizes(), " and highest ", highest.sizes(), "; expected both [] or both [T]");
  TORCH_CHECK_VALUE(sketch.dim() == lowest.dim() + 1 && sketch.size(-1) == kSketchBins &&
                        (lowest.dim() == 0 || sketch.size(0) == lowest.size(0)),
                    "qsim::search_range: sketch has shape ", sketch.sizes(), "; expected lowest's shape ",
                    lowest.sizes(), " and ", kSketchBins, " bins");
  TORCH_CHECK_VALUE(lowest.device() == highest.device() && lowest.device() == sketch.device(),
                    "qsim::search_range: lowest is on ", lowest.device(), ", highest on ", highest.device(),
                    " and sketch on ", sketch.device(), "; expected one device");
  if (low_bits) {
    TORCH_CHECK_TYPE(low_bits->scalar_type() == at::kInt, "qsim::search_range: low_bits is ",
                     described(low_bits->scalar_type()), "; expected int32");
    TORCH_CHECK_VALUE(low_bits->sizes() == lowest.sizes() && low_bits->device() == lowest.device(),
                      "qsim::search_range: low_bits has shape ", low_bits->sizes(), " on ", low_bits->device(),
                      "; expected lowest's shape ", lowest.sizes(), " on ", lowest.device());
  }
  const auto contiguous = at::MemoryFormat::Contiguous;
  return {at::empty_like(lowest, lowest.options(), contiguous), at::empty_like(lowest, lowest.options(), contiguous)};
}

}  // namespace qsim
