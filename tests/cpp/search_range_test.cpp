#include "qsim/search_range.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "levels.h"
#include "qsim/sketch.h"

using qsim::QuantGrid;
using qsim::RangeMethod;
using qsim::RangeSearch;
using qsim::cpu::Level;

namespace {

constexpr QuantGrid kInt8{-128, 127, false}, kInt8Symmetric{-128, 127, true}, kInt4Symmetric{-8, 7, true};
constexpr auto kMethods = qsim::kAll<RangeMethod>;

struct Ends {
  float low, high;
  bool operator==(const Ends&) const = default;
};

RangeSearch with(QuantGrid grid, RangeMethod method) {
  return {grid, method, 99.99, method == RangeMethod::mse ? 1.0 : 3.0};
}

Ends from_sketch(const std::vector<float>& x, RangeSearch search, Level level) {
  std::vector<std::int64_t> sketch(qsim::kSketchBins);
  std::uint32_t low_bits = 0;
  Ends seen{INFINITY, -INFINITY};
  for (float value : x) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    ++sketch[bits >> 18];
    low_bits |= bits & qsim::kLowBits;
    seen = {std::min(seen.low, value), std::max(seen.high, value)};
  }
  const auto& kernels = qsim::cpu::search_range_kernels(level);
  std::vector<std::byte> workspace(kernels.workspace_bytes);
  Ends chosen;
  kernels.run(seen.low, seen.high, sketch.data(), low_bits, search, workspace.data(), &chosen.low, &chosen.high);
  return chosen;
}

Ends from_data(const std::vector<float>& x, RangeSearch search, Level level) {
  const auto& kernels = qsim::cpu::search_range_data_kernels(level);
  const auto n = static_cast<std::int64_t>(x.size());
  std::vector<std::byte> workspace(kernels.workspace_bytes(qsim::Element::f32, n, search.method));
  Ends chosen;
  kernels.run[0](x.data(), n, search, workspace.data(), &chosen.low, &chosen.high);
  return chosen;
}

std::vector<float> normal(int n, float scale = 1) {
  std::mt19937 random(7);
  std::normal_distribution<float> draw(0, scale);
  std::vector<float> x(n);
  for (float& value : x) value = draw(random);
  return x;
}

std::vector<float> with_mantissa(std::vector<float> x, int bits) {
  for (float& value : x) value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & ~0u << (23 - bits));
  return x;
}

}  // namespace

TEST_CASE("every level chooses the same range") {
  for (const auto& x : {normal(1), normal(37), normal(5000), normal(5000, 1e30f), normal(5000, 1e-36f),
                        with_mantissa(normal(5000), 7), with_mantissa(normal(5000), 10)}) {
    for (RangeMethod method : kMethods) {
      for (QuantGrid grid : {kInt8, kInt8Symmetric, kInt4Symmetric, QuantGrid{0, 65535, false}}) {
        const RangeSearch search = with(grid, method);
        for (Level level : runnable_levels()) {
          CHECK(from_sketch(x, search, level) == from_sketch(x, search, Level::baseline));
          CHECK(from_data(x, search, level) == from_data(x, search, Level::baseline));
        }
      }
    }
  }
}

TEST_CASE("nothing seen has no range") {
  for (Level level : runnable_levels()) {
    for (RangeMethod method : kMethods) {
      CHECK(from_sketch({}, with(kInt8, method), level) == Ends{INFINITY, -INFINITY});
      CHECK(from_data({}, with(kInt8, method), level) == Ends{INFINITY, -INFINITY});
      CHECK(from_data({NAN, INFINITY, -INFINITY}, with(kInt8, method), level) == Ends{INFINITY, -INFINITY});
    }
  }
}

TEST_CASE("zeros and constants keep what they are") {
  for (Level level : runnable_levels()) {
    for (RangeMethod method : kMethods) {
      CHECK(from_sketch(std::vector<float>(100, 0.f), with(kInt8, method), level) == Ends{0, 0});
      CHECK(from_data(std::vector<float>(100, -0.f), with(kInt8, method), level) == Ends{0, 0});
      const Ends chosen = from_sketch(std::vector<float>(100, 1.7f), with(kInt8, method), level);
      CHECK(chosen.high == 1.7f);
    }
  }
}

TEST_CASE("values that are not finite are skipped") {
  std::vector<float> clean = normal(3000), mixed = clean;
  for (std::size_t i = 0; i < clean.size(); i += 3) {
    clean[i] = 0;  // exact on every grid
    mixed[i] = i % 2 ? NAN : INFINITY;
  }
  for (Level level : runnable_levels()) {
    for (RangeMethod method : {RangeMethod::minmax, RangeMethod::mse, RangeMethod::tf_enhanced}) {
      CHECK(from_data(mixed, with(kInt4Symmetric, method), level) ==
            from_data(clean, with(kInt4Symmetric, method), level));
    }
  }
}

TEST_CASE("few levels clip the tails, an outlier does not rule") {
  std::vector<float> x = normal(20000);
  for (Level level : runnable_levels()) {
    const Ends clipped = from_sketch(x, with(kInt4Symmetric, RangeMethod::mse), level);
    CHECK(clipped.high < 3.5f);
    CHECK(clipped.high > 2.f);
    std::vector<float> with_outlier = x;
    with_outlier[0] = 40;
    CHECK(from_sketch(with_outlier, with(kInt4Symmetric, RangeMethod::mse), level).high < 10);
    CHECK(from_data(with_outlier, with(kInt4Symmetric, RangeMethod::mse), level).high < 10);
  }
}

TEST_CASE("a sketch in which every bin is occupied fits the workspace") {
  constexpr QuantGrid kWidest{INT32_MIN, INT32_MAX, true};
  for (std::uint32_t low_bits : {12345u, 0u, 1u << 17, 1u << 16, 1u << 15, 1u << 14, 1u << 13, 1u << 12}) {
    std::vector<float> x;
    for (std::uint32_t bin = 0; bin < qsim::kSketchBins; ++bin) {
      const auto value = std::bit_cast<float>(bin << 18 | low_bits);
      if (std::isfinite(value)) x.push_back(value);
    }
    for (QuantGrid grid : {kInt8, QuantGrid{-32768, 32767, true}, QuantGrid{-32768, 32767, false}, kWidest}) {
      for (Level level : runnable_levels()) {
        const Ends chosen = from_sketch(x, with(grid, RangeMethod::mse), level);
        CHECK(std::isfinite(chosen.low));
        CHECK(chosen.low < chosen.high);
      }
    }
  }
}
