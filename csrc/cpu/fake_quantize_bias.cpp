// A loop per element type, compiled once: a bias has as few elements as its layer has channels.
#include "fake_quantize_bias.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>

#include "cpu/subnormals.h"
#include "qsim/fake_quantize_bias.h"

namespace qsim {
namespace {

using at::Tensor;

template <class T>
void quantize_bias(const Tensor& bias, const Tensor& input_scale, const Tensor& weight_scale, const Tensor& y,
                   const Tensor& mask) {
  const KeepSubnormals guard;
  using Rounded = std::conditional_t<std::is_same_v<T, double>, double, float>;  // to 16 bits by way of float32
  const auto* from = bias.const_data_ptr<T>();
  const auto *of_input = input_scale.const_data_ptr<float>(), *of_weight = weight_scale.const_data_ptr<float>();
  auto* to = y.mutable_data_ptr<T>();
  auto* bits = mask.defined() ? mask.mutable_data_ptr<std::uint8_t>() : nullptr;
  if (bits != nullptr) std::fill_n(bits, mask.numel(), 0);
  const std::int64_t scales = weight_scale.numel();
  for (std::int64_t i = 0; i < bias.numel(); ++i) {
    const QuantizedBias quantized = fake_quantize_bias(static_cast<double>(from[i]), *of_input, of_weight[i % scales]);
    to[i] = static_cast<T>(static_cast<Rounded>(quantized.value));
    if (bits != nullptr) bits[i / 8] |= static_cast<std::uint8_t>(quantized.in_range) << (i % 8);
  }
}

void run_on_bias(const Tensor& bias, const Tensor& input_scale, const Tensor& weight_scale, const Tensor& y,
                 const Tensor& mask) {
  switch (bias.scalar_type()) {
    case at::kFloat:
      return quantize_bias<float>(bias, input_scale, weight_scale, y, mask);
    case at::kDouble:
      return quantize_bias<double>(bias, input_scale, weight_scale, y, mask);
    case at::kHalf:
      return quantize_bias<c10::Half>(bias, input_scale, weight_scale, y, mask);
    default:
      return quantize_bias<c10::BFloat16>(bias, input_scale, weight_scale, y, mask);
  }
}

std::tuple<Tensor, Tensor> bias_with_mask_cpu(const Tensor& bias, const Tensor& input_scale,
                                              const Tensor& weight_scale) {
  return quantized_bias(bias, input_scale, weight_scale, true, run_on_bias);
}

Tensor bias_cpu(const Tensor& bias, const Tensor& input_scale, const Tensor& weight_scale) {
  return std::get<0>(quantized_bias(bias, input_scale, weight_scale, false, run_on_bias));
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim, CPU, m) {
  m.impl("fake_quantize_bias", bias_cpu);
  m.impl("fake_quantize_bias_with_mask", bias_with_mask_cpu);
}
}  // namespace qsim
