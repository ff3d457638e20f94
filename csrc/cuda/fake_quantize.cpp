#include "fake_quantize_call.h"
#include "fake_quantize_operators.h"

namespace qsim {
namespace {

using at::Tensor;

struct Cuda {
  static Tensor empty(const Tensor& x) { return at::empty_like(x); }
  static Tensor mask(const Tensor& x) { return empty_mask(x); }

  static void run(const Tensor& x, const Tensor& y, const Tensor& mask, const Tensor& scale, const Tensor& zero_point,
                  const FakeQuantizeOptions& options) {
    if (x.numel() == 0) return;
    const c10::cuda::CUDAGuard guard(x.device());
    const CudaCall call(x, scale, zero_point, options);
    auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
    check_launch(cuda::fake_quantize(call.call, x.const_data_ptr(), y.mutable_data_ptr(), bits, current_stream()));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CUDA, m) { FakeQuantizeOperators<Cuda>::implement(m); }
}  // namespace qsim
