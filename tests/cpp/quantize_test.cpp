#include "qsim/quantize.h"

#include <cstring>
#include <limits>
#include <type_traits>

#include "fake_quantize_cases.h"
#include "levels.h"

using qsim::BFloat16;
using qsim::Float16;
using qsim::Rounding;
using qsim::cpu::Bounds;
using qsim::cpu::Level;
using namespace cases;

namespace {

// The 16-bit formats: any bits.
template <class T>
std::vector<T> elements_of(std::int64_t n) {
  const auto wide = elements<qsim::arithmetic_t<T>>(n, 2);
  if constexpr (std::is_floating_point_v<T>) {
    return wide;
  } else {
    std::mt19937 random(4);
    std::vector<T> x(n);
    for (T& value : x) value.bits = static_cast<std::uint16_t>(random());
    return x;
  }
}

// From the definition, in integers.
template <class A>
std::int64_t expected_integer(A x, Grid<A> grid, std::int64_t quant_min, Rounding rounding) {
  if (std::isnan(x)) return quant_min;
  const A quotient = rounding == Rounding::divide ? x / grid.scale : x * (A(1) / grid.scale);
  const A steps = std::min(std::max(std::nearbyint(quotient), grid.low), grid.high);
  return std::isnan(quotient) ? quant_min : static_cast<std::int64_t>(steps - grid.low) + quant_min;
}

template <class T, class Q, class Kernel>
void check_quantize(Kernel kernel, std::int64_t quant_min, std::int64_t quant_max, Rounding rounding, bool irregular) {
  using A = qsim::arithmetic_t<T>;
  for (const Case& c : kCases) {
    for (Bounds bounds : {Bounds::of_range, Bounds::of_values}) {
      const Parameters<A> parameters(c, irregular, false, static_cast<A>(quant_min), static_cast<A>(quant_max), bounds);
      const auto x = elements_of<T>(c.n);
      const std::int64_t middle = c.n / 2 + 1;  // a chunk that starts inside a run
      std::vector<Q> q(c.n + 1, Q(0x5a));
      kernel(x.data(), q.data(), 0, middle, parameters.grids, c.layout, static_cast<A>(quant_min), rounding);
      kernel(x.data(), q.data(), middle, c.n, parameters.grids, c.layout, static_cast<A>(quant_min), rounding);
      int wrong = 0;
      for (std::int64_t e = 0; e < c.n; ++e) {
        const auto element = static_cast<A>(value_of(x[e]));
        const Grid<A> grid = parameters.at(parameter_of(e, c.layout));
        wrong += q[e] != static_cast<Q>(expected_integer(element, grid, quant_min, rounding));
      }
      CAPTURE(c.layout.outer, c.layout.segment, c.layout.width, c.layout.run, quant_min, quant_max, irregular);
      CHECK(wrong == 0);
      CHECK(q.back() == Q(0x5a));
    }
  }
}

template <class T>
void check_quantize(const qsim::cpu::Quantize<T>& kernels) {
  for (Rounding rounding : {Rounding::divide, Rounding::reciprocal}) {
    for (bool irregular : {false, true}) {
      check_quantize<T, std::uint8_t>(kernels.to_8, -128, 127, rounding, irregular);
      check_quantize<T, std::uint8_t>(kernels.to_8, 0, 255, rounding, irregular);
      check_quantize<T, std::uint8_t>(kernels.to_8, -8, 7, rounding, irregular);
      check_quantize<T, std::uint16_t>(kernels.to_16, -32768, 32767, rounding, irregular);
      check_quantize<T, std::uint16_t>(kernels.to_16, 0, 65535, rounding, irregular);
      check_quantize<T, std::uint16_t>(kernels.to_16, -5, 300, rounding, irregular);
    }
  }
}

// The element nearest to (q - zero point) * scale: exact in float32, then rounded by a search among neighbours.
template <class T>
bool is_nearest(T y, double exact) {
  const double error = std::abs(value_of(y) - exact);
  if constexpr (std::is_floating_point_v<T>) {
    return y == static_cast<T>(exact);
  } else {
    for (int step : {-1, 1}) {
      const T other{static_cast<std::uint16_t>(y.bits + step)};
      const double distance = std::abs(value_of(other) - exact);
      if (y.bits != 0 && (distance < error || (distance == error && y.bits & 1))) return false;
    }
    return true;
  }
}

template <class T, class Q, class Kernel>
void check_dequantize(Kernel kernel) {
  using A = qsim::arithmetic_t<T>;
  constexpr auto kLowest = std::numeric_limits<Q>::min(), kHighest = std::numeric_limits<Q>::max();
  for (const Case& c : kCases) {
    const Parameters<A> parameters(c, false, false, kLowest, kHighest, Bounds::of_values);
    std::mt19937 random(6);
    std::vector<Q> q(c.n);
    for (Q& value : q) value = static_cast<Q>(random());
    std::vector<T> y(c.n);
    const std::int64_t middle = c.n / 2 + 1;
    kernel(q.data(), y.data(), 0, middle, parameters.grids, c.layout);
    kernel(q.data(), y.data(), middle, c.n, parameters.grids, c.layout);
    int wrong = 0;
    for (std::int64_t e = 0; e < c.n; ++e) {
      const Grid<A> grid = parameters.at(parameter_of(e, c.layout));
      const A exact = (static_cast<A>(q[e]) - static_cast<A>(kLowest) + grid.low) * grid.scale;
      wrong += !is_nearest(y[e], exact) || std::signbit(value_of(y[e])) != (exact < 0);
    }
    CAPTURE(c.layout.outer, c.layout.segment, c.layout.width, c.layout.run);
    CHECK(wrong == 0);
  }
}

template <class T>
void check_dequantize(const qsim::cpu::Quantize<T>& kernels) {
  check_dequantize<T, std::int8_t>(kernels.from_i8);
  check_dequantize<T, std::uint8_t>(kernels.from_u8);
  check_dequantize<T, std::int16_t>(kernels.from_i16);
  check_dequantize<T, std::uint16_t>(kernels.from_u16);
}

}  // namespace

TEST_CASE("integers are those of the definition at every level") {
  for (Level level : runnable_levels()) {
    CAPTURE(qsim::cpu::name_of(level));
    const auto& kernels = qsim::cpu::quantize_kernels(level);
    check_quantize(kernels.f32);
    check_quantize(kernels.f64);
    check_quantize(kernels.f16);
    check_quantize(kernels.bf16);
  }
}

TEST_CASE("integers become the nearest elements at every level") {
  for (Level level : runnable_levels()) {
    CAPTURE(qsim::cpu::name_of(level));
    const auto& kernels = qsim::cpu::quantize_kernels(level);
    check_dequantize(kernels.f32);
    check_dequantize(kernels.f64);
    check_dequantize(kernels.f16);
    check_dequantize(kernels.bf16);
  }
}

TEST_CASE("without a lower clamp, what no integer holds still becomes quant_min") {
  const float scale = 0x1p-100f, zero_point = 100;  // quotients overflow
  std::vector<float> storage(Grids<float>::kArrays);
  Grids<float> grids = arrays(storage);
  std::vector<float> x(64, -3e38f);
  for (int i = 0; i < 16; ++i) x[i * 4] = i % 2 ? -kInf : i % 4 ? kNan : -kNan;
  for (Bounds bounds : {Bounds::of_range, Bounds::of_values}) {
    grids.regular = prepare_kernels(0.f).learned(&scale, &zero_point, 1, -128, 127, bounds, grids);
    REQUIRE(grids.regular);
    for (Level level : runnable_levels()) {
      std::vector<std::uint8_t> q(64);
      std::vector<std::uint16_t> wide(64);
      const auto& kernels = qsim::cpu::quantize_kernels(level).f32;
      kernels.to_8(x.data(), q.data(), 0, 64, grids, {64, 64, 1, 64}, -128, Rounding::divide);
      kernels.to_16(x.data(), wide.data(), 0, 64, grids, {64, 64, 1, 64}, -128, Rounding::divide);
      CHECK(q == std::vector<std::uint8_t>(64, 0x80));
      CHECK(wide == std::vector<std::uint16_t>(64, 0xff80));
    }
  }
}
