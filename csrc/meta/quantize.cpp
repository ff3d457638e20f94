#include "quantize.h"

#include <torch/library.h>

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor quantize_meta(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                     std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding,
                     std::optional<at::ScalarType> dtype) {
  check_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  return at::empty_like(x, x.options().dtype(storage_type(quant_min, quant_max, dtype)));
}

Tensor dequantize_meta(const Tensor& q, const Tensor& scale, const Tensor& zero_point, Axis axis, Axis block_size,
                       std::optional<at::ScalarType> dtype) {
  check_dequantize(q, scale, zero_point, axis, block_size);
  return at::empty_like(q, q.options().dtype(result_type(scale, dtype)));
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, Meta, m) {
  m.impl("quantize", quantize_meta);
  m.impl("dequantize", dequantize_meta);
}
}  // namespace qsim
