#include "qsim/dynamic.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <vector>

#include "levels.h"

using namespace qsim;

namespace {

const BlockElement kE2M1{1, 2, 6, 1};

BlockScaleRule rule(ScaleFormat format, ScaleRounding rounding, BlockElement element = kE2M1) {
  return {format, rounding, element, format_in<float>(FloatFormat::float8_e4m3fn, true)};
}

float power(float magnitude, ScaleRounding rounding) {
  return block_scale({-magnitude, 0}, rule(ScaleFormat::e8m0, rounding), 1);
}

std::vector<float> sample(std::int64_t n) {
  std::vector<float> x(n);
  for (std::int64_t i = 0; i < n; ++i) x[i] = std::sin(static_cast<float>(i) * 1.7f) * static_cast<float>(1 + i % 37);
  return x;
}

}  // namespace

TEST_CASE("powers of two are rounded as their names say") {
  CHECK(power(4, ScaleRounding::floor) == 1);
  CHECK(power(7.9f, ScaleRounding::floor) == 1);
  CHECK(power(4, ScaleRounding::ceil) == 1);
  CHECK(power(4.1f, ScaleRounding::ceil) == 2);
  CHECK(power(6.9f, ScaleRounding::even) == 1);
  CHECK(power(7, ScaleRounding::even) == 2);
  CHECK(power(6, ScaleRounding::rceil) == 1);
  CHECK(power(std::nextafter(6.f, 7.f), ScaleRounding::rceil) == 2);
}

TEST_CASE("powers of two end at 2^-127 and 2^127") {
  CHECK(power(0x1p-149f, ScaleRounding::floor) == 0x1p-127f);
  CHECK(power(FLT_MAX, ScaleRounding::floor) == 0x1p125f);
  CHECK(power(FLT_MAX, ScaleRounding::ceil) == 0x1p126f);
  CHECK(power(0, ScaleRounding::floor) == 1);
}

TEST_CASE("a range that is empty or not finite has no scale") {
  for (const ScaleFormat format : {ScaleFormat::e8m0, ScaleFormat::e4m3}) {
    const BlockScaleRule of = rule(format, ScaleRounding::floor);
    CHECK(std::isnan(block_scale({}, of, 1)));
    CHECK(std::isnan(block_scale({-INFINITY, 1}, of, 1)));
    CHECK(std::isnan(block_scale({NAN, 1}, of, 1)));
  }
}

TEST_CASE("two levels: the largest block has 448") {
  const BlockScaleRule of = rule(ScaleFormat::e4m3, ScaleRounding::floor);
  const float whole = scale_of_tensor(6 * 448, of);
  CHECK(whole == 1);
  CHECK(block_scale({-6 * 448, 0}, of, whole) == 448);
  CHECK(block_scale({0, 1e-20f}, of, whole) == 0x1p-9f);
  CHECK(scale_of_tensor(0, of) == 1);
}

TEST_CASE("groups are quantized by their own ranges, at every level") {
  const std::int64_t rows = 9, length = 77;
  const std::vector<float> x = sample(rows * length);
  const GroupRule rule{{-128, 127, false}, 0, nullptr, 1};
  for (const std::int64_t group : {1, 5, 32, 77}) {
    std::vector<float> expected(x.size());
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t at = 0; at < length; at += group) {
        const std::int64_t end = std::min(at + group, length);
        FiniteRange range;
        for (std::int64_t i = at; i < end; ++i) range.merge({x[row * length + i], x[row * length + i]});
        const auto params = choose_qparams<float>(range.lowest, range.highest, rule.grid, 0);
        const auto grid = make_grid<float>(params.scale, static_cast<float>(params.zero_point), -128, 127);
        for (std::int64_t i = row * length + at; i < row * length + end; ++i) {
          expected[i] = dequantize(nearest_steps(x[i] / grid.scale, grid), grid.scale);
        }
      }
    }
    for (const cpu::Level level : runnable_levels()) {
      CAPTURE(group, cpu::name_of(level));
      std::vector<float> y(x.size());
      cpu::fake_quantize_dynamic_kernels(level).f32(x.data(), y.data(), 0, rows, {length, group}, rule,
                                                    Rounding::divide);
      CHECK(y == expected);
    }
  }
}

TEST_CASE("groups are rounded with their own powers of two, at every level") {
  const std::int64_t rows = 6, length = 50, group = 32;
  const std::vector<float> x = sample(rows * length);
  const BlockScaleRule blocks = rule(ScaleFormat::e8m0, ScaleRounding::floor);
  const auto format = format_in<float>(FloatFormat::float4_e2m1fn, true);
  std::vector<float> expected(x.size());
  for (std::int64_t i = 0; i < rows * length; ++i) {
    const std::int64_t at = i % length / group * group, first = i / length * length;
    float largest = 0;
    for (std::int64_t j = at; j < std::min(at + group, length); ++j)
      largest = std::fmax(largest, std::fabs(x[first + j]));
    const float scale = std::exp2(std::floor(std::log2(largest)) - 2);
    expected[i] = round_to_format<false>(x[i] / scale, format) * scale;
  }
  for (const cpu::Level level : runnable_levels()) {
    std::vector<float> y(x.size());
    cpu::round_to_format_dynamic_kernels(level).f32(x.data(), y.data(), 0, rows, {length, group}, {{}, 0, &blocks, 1},
                                                    format);
    CHECK(y == expected);
  }
}
