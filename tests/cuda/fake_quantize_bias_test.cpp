#include "qsim/fake_quantize_bias.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/cuda/fake_quantize_bias.h"

namespace {

double widened(float x) { return x; }
double widened(double x) { return x; }
double widened(qsim::Float16 x) { return static_cast<double>(std::bit_cast<_Float16>(x.bits)); }
double widened(qsim::BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

// To 16 bits by way of float32.
template <class T>
T narrowed(double x) {
  const auto value = static_cast<float>(x);
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(x);
  } else if constexpr (std::is_same_v<T, qsim::Float16>) {
    return {std::bit_cast<std::uint16_t>(static_cast<_Float16>(value))};
  } else {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (value != value) return {static_cast<std::uint16_t>(bits >> 16 | 0x40)};
    return {static_cast<std::uint16_t>(qsim::round_upper_half(bits) >> 16)};
  }
}

}  // namespace

TEMPLATE_TEST_CASE("biases on int32 grids, and what is in range, equal the formula's", "", float, double, qsim::Float16,
                   qsim::BFloat16) {
  for (int n : {1, 7, 8, 9, 511, 512, 513, 1000}) {
    for (int scales : {1, n}) {
      for (float of_input :
           {0.03125f, 1e-9f, 1e-38f}) {  // the second clamps, the third makes subnormal scales and zeros
        CAPTURE(n, scales, of_input);
        const std::vector<TestType> bias = sample<TestType>(n);
        std::vector<float> of_weight(scales);
        for (int i = 0; i < scales; ++i) of_weight[i] = 0.001f * static_cast<float>(i + 1);
        std::vector<TestType> y(n);
        std::vector<std::uint8_t> mask((n + 7) / 8, 0);
        for (int i = 0; i < n; ++i) {
          const qsim::QuantizedBias expected =
              qsim::fake_quantize_bias(widened(bias[i]), of_input, of_weight[i % scales]);
          y[i] = narrowed<TestType>(expected.value);
          mask[i / 8] |= static_cast<std::uint8_t>(expected.in_range << (i % 8));
        }
        const DeviceArray<TestType> from(bias, 1), to(n, 1);
        const DeviceArray<float> one(std::vector<float>{of_input}), many(of_weight);
        const DeviceArray<std::uint8_t> bits(std::vector<std::uint8_t>(mask.size(), 0xa5));
        require(qsim::cuda::fake_quantize_bias(from.data(), kElementOf<TestType>, n, one.data(), many.data(), scales,
                                               to.data(), bits.data(), nullptr));
        CHECK(differences(to.host(), y) == 0);
        CHECK(bits.host() == mask);
        const DeviceArray<TestType> alone(n);
        require(qsim::cuda::fake_quantize_bias(from.data(), kElementOf<TestType>, n, one.data(), many.data(), scales,
                                               alone.data(), nullptr, nullptr));
        CHECK(differences(alone.host(), y) == 0);
      }
    }
  }
}

TEST_CASE("no bias, no launch") {
  CHECK(qsim::cuda::fake_quantize_bias(nullptr, qsim::Element::f32, 0, nullptr, nullptr, 1, nullptr, nullptr,
                                       nullptr) == cudaSuccess);
}
