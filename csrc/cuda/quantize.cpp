#include "quantize.h"

#include <torch/library.h>

#include "fake_quantize_call.h"
#include "qsim/cuda/quantize.h"

namespace qsim {
namespace {

using at::Tensor;
using Axis = std::optional<std::int64_t>;

Tensor quantize_cuda(const Tensor& x, const Tensor& scale, const Tensor& zero_point, std::int64_t quant_min,
                     std::int64_t quant_max, Axis axis, Axis block_size, std::string_view rounding,
                     std::optional<at::ScalarType> dtype) {
  const auto options = check_quantize(x, scale, zero_point, quant_min, quant_max, axis, block_size, rounding);
  const at::ScalarType storage = storage_type(quant_min, quant_max, dtype);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor from = dense(x), q = at::empty_like(from, from.options().dtype(storage));
  if (x.numel() == 0) return q;
  const CudaCall call(from, scale, zero_point, options);
  check_launch(cuda::quantize(call.call, from.const_data_ptr(), q.mutable_data_ptr(),
                              static_cast<int>(q.element_size()), current_stream()));
  return q;
}

Tensor dequantize_cuda(const Tensor& q, const Tensor& scale, const Tensor& zero_point, Axis axis, Axis block_size,
                       std::optional<at::ScalarType> dtype) {
  const auto options = check_dequantize(q, scale, zero_point, axis, block_size);
  const at::ScalarType type = result_type(scale, dtype);
  const c10::cuda::CUDAGuard guard(q.device());
  const Tensor from = dense(q), y = at::empty_like(from, from.options().dtype(type));
  if (q.numel() == 0) return y;
  const CudaCall call(y, scale, zero_point, options);
  check_launch(cuda::dequantize(call.call, integer_type(q.scalar_type())->kind, from.const_data_ptr(),
                                y.mutable_data_ptr(), current_stream()));
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("quantize", quantize_cuda);
  m.impl("dequantize", dequantize_cuda);
}
}  // namespace qsim
