#include "block_scale.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "launch.h"
#include "qsim/cuda/block_scale.h"

namespace qsim {
namespace {

at::Tensor choose_block_scale_cuda(const at::Tensor& lowest, const at::Tensor& highest, std::string_view element,
                                   std::string_view scale_format, std::string_view scale_rounding) {
  const BlockScaleRule rule = check_block_scale(lowest, highest, element, scale_format, scale_rounding);
  const c10::cuda::CUDAGuard guard(lowest.device());
  const at::Tensor scale = empty_block_scale(lowest), low = lowest.contiguous(), high = highest.contiguous();
  const at::Tensor magnitude = at::empty({}, lowest.options());
  check_launch(cuda::block_scale(low.const_data_ptr<float>(), high.const_data_ptr<float>(), scale.numel(), rule,
                                 magnitude.mutable_data_ptr<float>(), scale.mutable_data_ptr<float>(),
                                 current_stream()));
  return scale;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) { m.impl("choose_block_scale", choose_block_scale_cuda); }
}  // namespace qsim
