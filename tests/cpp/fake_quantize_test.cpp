#include "qsim/fake_quantize.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "fake_quantize_cases.h"
#include "levels.h"

using qsim::BFloat16;
using qsim::Float16;
using qsim::Grid;
using qsim::Layout;
using qsim::Rounding;
using qsim::cpu::Grids;
using qsim::cpu::Level;
using namespace cases;

namespace {

template <Rounding rounding, class T>
T expected_y(T x, Grid<T> grid) {
  return qsim::dequantize(qsim::nearest_steps(qsim::quotient<rounding>(x, grid.scale), grid), grid.scale);
}

template <class T, class Kernels, class Backward>
void check_against_functors(const Kernels& kernels, const Backward& backward, Rounding rounding, bool irregular) {
  for (const Case& c : kCases) {
    const Parameters<T> parameters(c, irregular);
    CHECK(parameters.grids.regular == (sizeof(T) == 4 && !irregular));
    const auto x = elements<T>(c.n, 2), grad = elements<T>(c.n, 3);
    const auto middle = c.n / 2 / 8 * 8;  // a chunk that starts inside a run
    std::vector<T> y(c.n), masked(c.n), dx(c.n), in_place = x;
    std::vector<std::uint8_t> mask((c.n + 7) / 8, 0xaa);
    for (auto [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, middle}, {middle, c.n}}) {
      kernels.forward(x.data(), y.data(), begin, end, parameters.grids, c.layout, rounding);
      kernels.forward(in_place.data(), in_place.data(), begin, end, parameters.grids, c.layout, rounding);
      kernels.with_mask(x.data(), masked.data(), mask.data(), begin, end, parameters.grids, c.layout, rounding);
      backward(grad.data(), x.data(), dx.data(), begin, end, parameters.grids, c.layout, rounding);
    }
    int wrong = 0;
    for (std::int64_t e = 0; e < c.n; ++e) {
      const Grid<T> grid = parameters.at(parameter_of(e, c.layout));
      const bool divide = rounding == Rounding::divide;
      const T expected =
          divide ? expected_y<Rounding::divide>(x[e], grid) : expected_y<Rounding::reciprocal>(x[e], grid);
      const T quotient = divide ? qsim::quotient<Rounding::divide>(x[e], grid.scale)
                                : qsim::quotient<Rounding::reciprocal>(x[e], grid.scale);
      const bool inside = qsim::in_range(quotient, grid);
      wrong += !same_bits(y[e], expected) || !same_bits(in_place[e], expected) || !same_bits(masked[e], expected);
      wrong += (mask[e / 8] >> e % 8 & 1) != inside;
      wrong += !same_bits(dx[e], inside ? grad[e] : T(0));
    }
    CAPTURE(c.layout.outer, c.layout.segment, c.layout.width, c.layout.run);
    CHECK(wrong == 0);
    CHECK((c.n % 8 == 0 || mask.back() >> c.n % 8 == 0));
  }
}

double overflow(Float16) { return 65520; }  // the largest number and half a step
double overflow(BFloat16) { return 0x1.ffp127; }

template <class Half>
bool is_nearest(Half rounded, double exact) {
  if (std::isnan(exact)) return std::isnan(value_of(rounded));
  const double error = std::abs(value_of(rounded) - exact);
  if (std::isinf(value_of(rounded))) return std::isinf(exact) || std::abs(exact) >= overflow(Half{});
  for (int step : {-1, 1}) {
    const Half other{static_cast<std::uint16_t>(rounded.bits + step)};
    if ((other.bits ^ rounded.bits) & 0x8000 || !std::isfinite(value_of(other))) continue;
    const double distance = std::abs(value_of(other) - exact);
    if (distance < error || (distance == error && rounded.bits & 1)) return false;
  }
  return true;
}

template <class Half, class Kernels>
void check_every_value(const Kernels& kernels) {
  std::vector<Half> x(65536), y(65536);
  for (int i = 0; i < 65536; ++i) x[i].bits = static_cast<std::uint16_t>(i);
  for (float scale : {0.1f, 1.f, 3e-8f, 1e-4f, 700.f, 1e-35f, 1e-40f}) {
    const float low = -130, high = 125, zero_point = 0;
    std::vector<float> storage(Grids<float>::kArrays);
    Grids<float> grids = arrays(storage);
    grids.regular =
        prepare_kernels(0.f).learned(&scale, &zero_point, 1, low, high, qsim::cpu::Bounds::of_values, grids);
    kernels.forward(x.data(), y.data(), 0, 65536, grids, {65536, 65536, 1, 65536}, Rounding::divide);
    int wrong = 0;
    for (int i = 0; i < 65536; ++i) {
      const float exact =
          expected_y<Rounding::divide>(static_cast<float>(value_of(x[i])), Grid<float>{scale, low, high});
      wrong += !is_nearest(y[i], exact) || y[i].bits == 0x8000;
    }
    CAPTURE(scale);
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("elementwise kernels equal the functors at every level") {
  for (Level level : runnable_levels()) {
    CAPTURE(qsim::cpu::name_of(level));
    const auto& forward = qsim::cpu::fake_quantize_kernels(level);
    const auto& backward = qsim::cpu::fake_quantize_backward_kernels(level);
    for (Rounding rounding : {Rounding::divide, Rounding::reciprocal}) {
      check_against_functors<float>(forward.f32, backward.f32, rounding, false);
      check_against_functors<float>(forward.f32, backward.f32, rounding, true);
      check_against_functors<double>(forward.f64, backward.f64, rounding, false);
    }
  }
}

TEST_CASE("16-bit formats: every value is rounded once, to nearest even, and no zero is negative") {
  for (Level level : runnable_levels()) {
    CAPTURE(qsim::cpu::name_of(level));
    check_every_value<Float16>(qsim::cpu::fake_quantize_kernels(level).f16);
    check_every_value<BFloat16>(qsim::cpu::fake_quantize_kernels(level).bf16);
  }
}

TEST_CASE("the functors keep their promises") {
  const Grid<float> grid = qsim::make_grid(0.5f, 3.f, -8.f, 7.f);  // steps -11 .. 4
  const auto y = [&](float x) { return expected_y<Rounding::divide>(x, grid); };
  CHECK(y(kInf) == 2);
  CHECK(y(-kInf) == -5.5f);
  CHECK(y(3e38f) == 2);
  CHECK(std::isnan(y(kNan)));
  CHECK(y(0.25f) == 0);  // ties to even
  CHECK(y(0.75f) == 1);
  CHECK_FALSE(std::signbit(y(-0.1f)));
  CHECK_FALSE(std::signbit(y(-0.f)));
  CHECK(qsim::make_grid(1.f, 2.5f, -8.f, 7.f).low == -10);  // a learned zero point is rounded half to even
  CHECK(qsim::make_grid(1.f, 99.f, -8.f, 7.f).high == 0);   // and clamped
  CHECK(std::isnan(qsim::make_grid(1.f, kNan, -8.f, 7.f).scale));
  CHECK(qsim::scale_term(kInf, kNan, kNan, grid) == 0);
  CHECK(std::isnan(qsim::scale_term(kNan, 0.3f, 0.6f, grid)));
}

TEST_CASE("masked gradients keep the bits of every width") {
  std::vector<std::uint8_t> mask(13);
  std::mt19937 random(5);
  for (auto& byte : mask) byte = static_cast<std::uint8_t>(random());
  const auto check = [&](auto kernel, auto zero) {
    using U = decltype(zero);
    std::vector<U> grad(101), dx(101);
    for (U& g : grad) g = static_cast<U>(random());
    kernel(grad.data(), mask.data(), dx.data(), 0, 40);
    kernel(grad.data(), mask.data(), dx.data(), 40, 101);
    for (int e = 0; e < 101; ++e) CHECK(dx[e] == (mask[e / 8] >> e % 8 & 1 ? grad[e] : U(0)));
  };
  for (Level level : runnable_levels()) {
    const auto& kernels = qsim::cpu::fake_quantize_backward_kernels(level);
    check(kernels.masked_16, std::uint16_t{});
    check(kernels.masked_32, std::uint32_t{});
    check(kernels.masked_64, std::uint64_t{});
  }
}

TEST_CASE("learned gradients: close to float64 sums, the same bits at every level") {
  for (const Case& c : kCases) {
    CAPTURE(c.layout.outer, c.layout.segment, c.layout.width, c.layout.run);
    const Parameters<float> parameters(c, false, true);
    const auto x = elements<float>(c.n, 2);
    std::vector<float> grad(c.n);
    std::mt19937 random(9);
    for (float& g : grad) g = std::normal_distribution<float>()(random);
    const std::int64_t count = static_cast<std::int64_t>(parameters.scales.size()), row = c.layout.width * c.layout.run;
    const std::int64_t length = c.layout.width == 1 ? 500 : 2 * row;
    const qsim::Slices slices{length, (c.layout.segment + length - 1) / length};
    const std::int64_t sums = count * slices.per_segment;

    std::vector<double> expected_scale(count), expected_zero(count);
    for (std::int64_t e = 0; e < c.n; ++e) {
      const std::int64_t p = parameter_of(e, c.layout);
      const Grid<float> grid = parameters.at(p);
      const float quotient = x[e] / grid.scale;
      expected_scale[p] += qsim::scale_term(grad[e], x[e], quotient, grid);
      expected_zero[p] -= static_cast<double>(grid.scale) * qsim::zero_point_term(grad[e], x[e], quotient, grid);
    }
    std::vector<float> first_scale, first_zero;
    for (Level level : runnable_levels()) {
      const auto& kernels = qsim::cpu::fake_quantize_learnable_kernels(level);
      std::vector<float> dx(c.n), dscale(count), dzero(count);
      std::vector<double> scale_sums(sums), zero_sums(sums);
      const std::int64_t segments = count / c.layout.width;
      kernels.f32(grad.data(), x.data(), dx.data(), 0, segments * slices.per_segment, parameters.grids, c.layout,
                  Rounding::divide, slices, {scale_sums.data(), zero_sums.data()});
      kernels.fold_f32({scale_sums.data(), zero_sums.data()}, slices, count, c.layout.width, 1, 1,
                       parameters.scales.data(), 0.5, dscale.data(), dzero.data());
      int wrong = 0;
      for (std::int64_t e = 0; e < c.n; ++e) {
        const Grid<float> grid = parameters.at(parameter_of(e, c.layout));
        wrong += !same_bits(dx[e], qsim::in_range(x[e] / grid.scale, grid) ? grad[e] : 0.f);
      }
      CHECK(wrong == 0);
      for (std::int64_t p = 0; p < count; ++p) {
        CHECK(dscale[p] == Approx(0.5 * expected_scale[p]).epsilon(1e-4).margin(1e-3));
        CHECK(dzero[p] == Approx(0.5 * expected_zero[p]).epsilon(1e-4).margin(1e-3));
      }
      if (first_scale.empty()) {
        first_scale = dscale;
        first_zero = dzero;
      }
      CHECK(std::memcmp(dscale.data(), first_scale.data(), sizeof(float) * count) == 0);
      CHECK(std::memcmp(dzero.data(), first_zero.data(), sizeof(float) * count) == 0);
    }
  }
}

TEST_CASE("grids are prepared and repeated") {
  for (Level level : runnable_levels()) {
    const auto& kernels = qsim::cpu::fake_quantize_kernels(level).prepare_f32;
    const float scale[] = {0.5f, 2.f}, learned[] = {0.5f, 1.5f};
    const std::int32_t zero_point[] = {3, -20};
    std::vector<float> storage(6 * 2), repeated(6 * 12);
    const Grids<float> grids = arrays(storage), all = arrays(repeated);
    const auto steps = [&] { return std::vector<float>{grids.low[0], grids.low[1], grids.high[0], grids.high[1]}; };
    CHECK(kernels.integer(scale, zero_point, 2, -8, 7, qsim::cpu::Bounds::of_range, grids));
    CHECK(std::vector<float>(grids.scale, grids.scale + 4) == std::vector<float>{0.5f, 2, 2, 0.5f});
    CHECK(steps() == std::vector<float>{-11, 0, 4, 15});
    CHECK(kernels.learned(scale, learned, 2, -8, 7, qsim::cpu::Bounds::of_range, grids));
    CHECK(steps() == std::vector<float>{-8, -10, 7, 5});
    kernels.repeat(grids, 2, 3, 2, all);
    for (int i = 0; i < 6 * 12; ++i) CHECK(repeated[i] == storage[i / 12 * 2 + i % 6 / 3]);
  }
}
