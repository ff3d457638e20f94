#include "qsim/exact_quotient.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "levels.h"

using qsim::Grid;
using qsim::Rounding;
using qsim::cpu::Bounds;
using qsim::cpu::Level;

namespace {

bool is_in_range(float x, Grid<float> grid) {
  return qsim::in_range(qsim::quotient<Rounding::divide>(x, grid.scale), grid);
}

// Scales over the whole regular range: its ends, powers of two, mantissas of all ones, and any.
std::vector<float> regular_scales(int count) {
  std::vector<float> scales = {0x1p-100f,      0x1p24f,       1,   0x1.fffffep-1f, 0x1.fffffep-100f,
                               0x1.fffffep23f, 0x1.000002p0f, 0.1f};
  std::mt19937 random(7);
  while (static_cast<int>(scales.size()) < count) {
    const int exponent = static_cast<int>(random() % (scales.size() % 2 ? 124 : 16)) - (scales.size() % 2 ? 100 : 12);
    scales.push_back(std::ldexp(1 + static_cast<float>(random() % (1 << 23)) * 0x1p-23f, exponent));
  }
  return scales;
}

const std::vector<std::pair<float, float>> kGrids = {
    {-128, 127}, {0, 255}, {-255, 0}, {-8, 7}, {-1, 0}, {-32768, 32767}, {-100000, 200001}, {-0x1p21f, 0x1p21f}};

std::vector<float> every_kind_of_float(Grid<float> grid) {
  std::vector<float> x;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 4099 * 11) {  // no power of two: mantissas vary
    const auto word = static_cast<std::uint32_t>(bits);
    x.emplace_back();
    std::memcpy(&x.back(), &word, 4);
  }
  const int first = static_cast<int>(std::max(grid.low, -300.f)) - 2,
            last = static_cast<int>(std::min(grid.high, 300.f)) + 2;
  for (int k = first; k <= last; ++k) {  // what rounds to a tie, or nearly
    float near = (static_cast<float>(k) + 0.5f) * grid.scale;
    for (int i = 0; i < 4; ++i) near = std::nextafter(near, -INFINITY);
    for (int i = 0; i < 9; ++i, near = std::nextafter(near, INFINITY)) x.push_back(near);
  }
  for (float special : {0.f, -0.f, INFINITY, -INFINITY, NAN, 1e-45f, -1e-45f, 3.4e38f, -3.4e38f}) x.push_back(special);
  return x;
}

}  // namespace

// Scaled to integers, a divisor S and a dividend X lie in [2^23, 2^24) and a midpoint of two quotients is an odd M in
// [2^24, 2^25) over 2^c. The correction errs by less than |X * 2^c - M * S| = 6 stands for: by at most 3 from the
// inverse and 2 from the remainder. So only pairs with a smaller difference could come out wrong, and these are all.
TEST_CASE("the corrected quotient is exact for every divisor") {
  std::int64_t visited = 0, wrong = 0;
  for (std::uint64_t divisor = 1 << 23; divisor < 1 << 24; ++divisor) {
    const int zeros = __builtin_ctzll(divisor);
    if (zeros > 3) continue;  // then so has the difference, which is 8 at most
    std::uint64_t odd = divisor >> zeros, inverse_modulo = odd;
    for (int i = 0; i < 5; ++i) inverse_modulo *= 2 - odd * inverse_modulo;  // Newton, modulo 2^64
    const auto scale = static_cast<float>(divisor), inverse = 1 / scale;
    for (int c = 24; c <= 25; ++c) {
      for (std::int64_t difference = -8; difference <= 8; ++difference) {
        if (difference == 0 || __builtin_ctzll(static_cast<std::uint64_t>(difference)) != zeros) continue;  // M is odd
        const std::uint64_t period = std::uint64_t{1} << (c - zeros);
        const std::uint64_t residue = static_cast<std::uint64_t>(-(difference >> zeros)) * inverse_modulo % period;
        for (std::uint64_t m = (1 << 24) / period * period + residue; m < 1 << 25; m += period) {
          const std::uint64_t dividend = (m * divisor + static_cast<std::uint64_t>(difference)) >> c;
          if (m < 1 << 24 || dividend >> 23 != 1 || (c == 24) != (dividend >= divisor)) continue;
          const auto x = static_cast<float>(dividend);
          ++visited;
          wrong += qsim::exact_quotient(x, scale, inverse) != x / scale;
        }
      }
    }
  }
  CHECK(visited > 40'000'000);
  CHECK(wrong == 0);
}

TEST_CASE("thresholds are the first and last x in range") {
  for (float scale : regular_scales(2000)) {
    for (auto [low, high] : kGrids) {
      const Grid<float> grid{scale, low, high};
      const auto [lowest, highest] = qsim::thresholds(grid);
      CAPTURE(scale, low, high);
      REQUIRE(qsim::is_regular(grid));
      REQUIRE(is_in_range(lowest, grid));
      REQUIRE(is_in_range(highest, grid));
      REQUIRE_FALSE(is_in_range(std::nextafter(lowest, -INFINITY), grid));
      REQUIRE_FALSE(is_in_range(std::nextafter(highest, INFINITY), grid));
    }
  }
}

TEST_CASE("kernels without division equal the contract, element and mask") {
  for (float scale : regular_scales(20)) {
    for (auto [low, high] : kGrids) {
      const Grid<float> grid{scale, low, high};
      const std::vector<float> x = every_kind_of_float(grid);
      const auto n = static_cast<std::int64_t>(x.size());
      std::vector<float> y(x.size()), expected(x.size()), by_steps(x.size());
      std::vector<std::uint8_t> mask(x.size() / 8 + 1), expected_mask(mask.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        const float quotient = qsim::quotient<Rounding::divide>(x[i], scale);
        expected[i] = qsim::dequantize(qsim::nearest_steps(quotient, grid), scale);
        expected_mask[i / 8] |= static_cast<std::uint8_t>(qsim::in_range(quotient, grid) << i % 8);
        const auto [value, nearest, steps] = qsim::quantize_regular_steps(x[i], grid, 1 / scale);
        by_steps[i] = value;
        REQUIRE((nearest == steps) == qsim::in_range(quotient, grid));
      }
      int off = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        off += std::isnan(expected[i]) ? !std::isnan(by_steps[i]) : std::memcmp(&by_steps[i], &expected[i], 4) != 0;
      }
      REQUIRE(off == 0);
      for (Level level : runnable_levels()) {
        const auto& kernels = qsim::cpu::fake_quantize_kernels(level);
        float of[6], zero_point = 0;
        qsim::cpu::Grids<float> grids{of, of + 1, of + 2, of + 3, of + 4, of + 5};
        const auto prepare = [&](Bounds bounds) {
          grids.regular = kernels.prepare_f32.learned(&scale, &zero_point, 1, low, high, bounds, grids);
          REQUIRE(grids.regular);
        };
        std::vector<float> masked(x.size());
        prepare(Bounds::of_values);
        kernels.f32.forward(x.data(), y.data(), 0, n, grids, {n, n, 1, n}, Rounding::divide);
        prepare(Bounds::of_range);
        kernels.f32.with_mask(x.data(), masked.data(), mask.data(), 0, n, grids, {n, n, 1, n}, Rounding::divide);
        REQUIRE(std::memcmp(y.data(), masked.data(), x.size() * sizeof(float)) == 0);
        int wrong = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
          wrong += std::isnan(expected[i]) ? !std::isnan(y[i]) : std::memcmp(&y[i], &expected[i], 4) != 0;
        }
        CAPTURE(qsim::cpu::name_of(level), scale, low, high);
        REQUIRE(wrong == 0);
        REQUIRE(std::memcmp(mask.data(), expected_mask.data(), (x.size() + 7) / 8) == 0);
      }
    }
  }
}
