#include "qsim/choose_qparams.h"

#include <cmath>
#include <limits>
#include <vector>

#include "levels.h"

using qsim::QuantGrid;
using qsim::cpu::Level;

namespace {

constexpr QuantGrid kInt8{-128, 127, false}, kInt8Symmetric{-128, 127, true}, kInt2Symmetric{-2, 1, true};

qsim::QuantParams<float> choose(float low, float high, QuantGrid grid, Level level, double min_scale = 0) {
  qsim::QuantParams<float> params;
  qsim::cpu::choose_qparams_kernels(level).f32(&low, &high, 1, grid, min_scale, &params.scale, &params.zero_point);
  return params;
}

}  // namespace

TEST_CASE("known encodings") {
  for (Level level : runnable_levels()) {
    CHECK(choose(0, 255, kInt8, level).scale == 1);
    CHECK(choose(0, 255, kInt8, level).zero_point == -128);
    CHECK(choose(-255, 0, kInt8, level).zero_point == 127);
    CHECK(choose(5, 255, kInt8, level).scale == 1);  // zero joins the range
    CHECK(choose(-128, 127, kInt8Symmetric, level).scale == 1);
    CHECK(choose(-3, 254, kInt8Symmetric, level).scale == 2);
    CHECK(choose(-1, 4, kInt2Symmetric, level).scale == 2);  // all four levels used
    CHECK(choose(0, 0, kInt8, level).scale == 1);
    CHECK(choose(0, 1e-45f, kInt8, level).scale == std::numeric_limits<float>::min());
    CHECK(choose(0, 1e-9f, kInt8, level, 1.19e-7).scale == 1.19e-7f);
  }
}

TEST_CASE("both ends of the grid are finite for every finite range") {
  const float big = std::numeric_limits<float>::max();
  for (Level level : runnable_levels()) {
    for (QuantGrid grid : {kInt8, kInt8Symmetric, kInt2Symmetric, QuantGrid{0, 65535, false}, QuantGrid{0, 15, true}}) {
      for (float low : {-big, -3e38f, -1.f, 0.f}) {
        for (float high : {0.f, 1.f, 3e38f, big}) {
          const auto [scale, zero_point] = choose(low, high, grid, level);
          CHECK(std::isfinite(static_cast<float>(grid.quant_max - zero_point) * scale));
          CHECK(std::isfinite(static_cast<float>(grid.quant_min - zero_point) * scale));
        }
      }
    }
    CHECK(choose(-3e38f, 3e38f, kInt8, level).scale == static_cast<float>(6e38 / 255));
  }
}

TEST_CASE("a range that is empty or not finite has no scale") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (Level level : runnable_levels()) {
    CHECK(std::isnan(choose(inf, -inf, kInt8, level).scale));
    CHECK(std::isnan(choose(0, inf, kInt8Symmetric, level).scale));
    CHECK(std::isnan(choose(nan, 1, kInt8, level).scale));
    CHECK(std::isnan(choose(0, nan, kInt8, level).scale));
  }
}
