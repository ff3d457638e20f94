// What the CPU, CUDA and Meta kernels of choose_qparams check and allocate alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <tuple>

#include "described.h"
#include "qsim/choose_qparams.h"

namespace qsim {

inline QuantGrid quant_grid(std::int64_t quant_min, std::int64_t quant_max, bool symmetric) {
  TORCH_CHECK_VALUE(quant_min < quant_max && quant_min >= INT32_MIN && quant_max <= INT32_MAX, "qsim: quant_min ",
                    quant_min, " and quant_max ", quant_max, " are no int32 grid with quant_min < quant_max");
  return {static_cast<std::int32_t>(quant_min), static_cast<std::int32_t>(quant_max), symmetric};
}

inline void check_min_scale(double min_scale) {
  TORCH_CHECK_VALUE(min_scale >= 0, "qsim::choose_qparams: min_scale is ", min_scale, "; expected 0 or more");
}

inline std::tuple<at::Tensor, at::Tensor> empty_qparams(const at::Tensor& min, const at::Tensor& max) {
  const at::ScalarType type = min.scalar_type();
  TORCH_CHECK_TYPE(type == max.scalar_type() && (type == at::kFloat || type == at::kDouble),
                   "qsim::choose_qparams: min is ", described(type), " and max ", described(max.scalar_type()),
                   "; expected both float32 or both float64");
  TORCH_CHECK_VALUE(min.sizes() == max.sizes(), "qsim::choose_qparams: min has shape ", min.sizes(), " and max ",
                    max.sizes(), "; expected the same shape");
  TORCH_CHECK_VALUE(min.device() == max.device(), "qsim::choose_qparams: min is on ", min.device(), " and max on ",
                    max.device(), "; expected one device");
  const auto contiguous = at::MemoryFormat::Contiguous;
  return {at::empty_like(min, min.options(), contiguous),
          at::empty_like(min, min.options().dtype(at::kInt), contiguous)};
}

}  // namespace qsim
