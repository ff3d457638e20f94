#include "qsim/choose_qparams.h"

#include <catch2/catch.hpp>

#include "device.h"
#include "qsim/cuda/choose_qparams.h"

namespace {

const auto& kernel_for(const float*) { return qsim::cpu::choose_qparams_kernels().f32; }
const auto& kernel_for(const double*) { return qsim::cpu::choose_qparams_kernels().f64; }

}  // namespace

TEMPLATE_TEST_CASE("scales and zero points equal the CPU's", "", float, double) {
  const qsim::QuantGrid grids[] = {
      {-128, 127, false}, {-128, 127, true}, {0, 255, true}, {0, 65535, false}, {-2, 1, true}};
  for (const qsim::QuantGrid grid : grids) {
    for (int n : {1, 255, 256, 1000}) {
      const std::vector<TestType> a = sample<TestType>(n), b = sample<TestType>(n, 0.25, 2);
      std::vector<TestType> low(n), high(n), scale(n);
      std::vector<std::int32_t> zero_point(n);
      for (int i = 0; i < n; ++i) {
        low[i] = b[i] < a[i] ? b[i] : a[i];
        high[i] = b[i] < a[i] ? a[i] : b[i];
      }
      kernel_for(low.data())(low.data(), high.data(), n, grid, 1e-7, scale.data(), zero_point.data());
      const DeviceArray<TestType> device_low(low), device_high(high), device_scale(n);
      const DeviceArray<std::int32_t> device_zero(n);
      require(qsim::cuda::choose_qparams(device_low.data(), device_high.data(), n, grid, 1e-7, device_scale.data(),
                                         device_zero.data(), nullptr));
      CHECK(differences(device_scale.host(), scale) == 0);
      CHECK(device_zero.host() == zero_point);
    }
  }
}

TEST_CASE("no ranges, no launch") {
  CHECK(qsim::cuda::choose_qparams<float>(nullptr, nullptr, 0, {-8, 7, false}, 0, nullptr, nullptr, nullptr) ==
        cudaSuccess);
}
