#include "qsim/cuda/block_scale.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <vector>

#include "device.h"

using namespace qsim;

TEST_CASE("scales of blocks are the CPU's") {
  const BlockElement elements[] = {{1, 2, 6, 1}, {3, 2, 7.5f, 1}, {6, 0, 127 / 64.f, 1 / 64.f}};
  const auto element = elements[GENERATE(0, 1, 2)];
  const auto format = GENERATE(ScaleFormat::e8m0, ScaleFormat::e4m3);
  const auto rounding = GENERATE(ScaleRounding::floor, ScaleRounding::ceil, ScaleRounding::even, ScaleRounding::rceil);
  const std::int64_t n = GENERATE(1, 31, 257, 20000);
  std::vector<float> low(n), high(n), expected(n);
  float magnitude = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    high[i] = std::exp2(std::sin(static_cast<float>(i)) * 100);
    low[i] = i % 3 == 0 ? -2 * high[i] : 0;
    if (i % 100 == 7) high[i] = i % 200 == 7 ? INFINITY : -INFINITY;
    const float largest = std::fmax(-low[i], high[i]);
    if (low[i] <= high[i] && largest < INFINITY) magnitude = std::fmax(magnitude, largest);
  }
  const BlockScaleRule rule{format, rounding, element, format_in<float>(FloatFormat::float8_e4m3fn, true)};
  cpu::block_scale_kernels().run(low.data(), high.data(), n, rule, magnitude, expected.data());
  const DeviceArray<float> device_low(low), device_high(high), room(1), scale(n);
  require(cuda::block_scale(device_low.data(), device_high.data(), n, rule, room.data(), scale.data(), nullptr));
  CHECK(differences(scale.host(), expected) == 0);
}
