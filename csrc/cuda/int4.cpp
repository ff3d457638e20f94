#include "int4.h"

#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/int4.h"

namespace qsim {
namespace {

using at::Tensor;

Tensor pack_int4_cuda(const Tensor& q) {
  const c10::cuda::CUDAGuard guard(q.device());
  const Tensor packed = empty_packed(q), from = q.contiguous();
  check_launch(cuda::pack_int4(static_cast<const std::uint8_t*>(from.const_data_ptr()), q.numel(),
                               packed.mutable_data_ptr<std::uint8_t>(), current_stream()));
  return packed;
}

Tensor unpack_int4_cuda(const Tensor& packed, at::IntArrayRef shape, std::optional<at::ScalarType> dtype) {
  const c10::cuda::CUDAGuard guard(packed.device());
  const Tensor q = empty_unpacked(packed, c10::fromIntArrayRefSlow(shape), dtype), from = packed.contiguous();
  check_launch(cuda::unpack_int4(from.const_data_ptr<std::uint8_t>(), q.numel(), q.scalar_type() == at::kChar,
                                 static_cast<std::uint8_t*>(q.mutable_data_ptr()), current_stream()));
  return q;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) {
  m.impl("pack_int4", pack_int4_cuda);
  m.impl("unpack_int4", unpack_int4_cuda);
}
}  // namespace qsim
