// The arguments of the CUDA kernels of fake_quantize, and the tensors that keep their memory alive.
#pragma once

#include "fake_quantize_layout.h"
#include "launch.h"
#include "qsim/cuda/fake_quantize.h"

namespace qsim {

// x is dense and not empty.
struct CudaCall {
  CudaCall(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& zero_point,
           const FakeQuantizeOptions& options)
      : scale(in_memory_order(scale, x, options)), zero_point(in_memory_order(zero_point, x, options)) {
    call = {element_of(x),
            x.numel(),
            {this->scale.const_data_ptr(), this->zero_point.const_data_ptr(), zero_point.scalar_type() != at::kInt,
             static_cast<double>(options.quant_min), static_cast<double>(options.quant_max)},
            layout_of(x, options),
            options.rounding};
  }

  at::Tensor scale, zero_point;  // in memory order
  cuda::FakeQuantizeCall call;
};

}  // namespace qsim
