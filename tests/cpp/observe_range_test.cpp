#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "levels.h"
#include "qsim/finite_range.h"

using qsim::Element;
using qsim::FiniteRange;
using qsim::NonFinite;
using qsim::cpu::Level;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct State {
  std::vector<float> lowest, highest;
  NonFinite counts;
  explicit State(std::int64_t ranges) : lowest(ranges, kInf), highest(ranges, -kInf) {}
};

void check_same(const State& got, const State& expected) {
  const auto bytes = got.lowest.size() * sizeof(float);
  CHECK(std::memcmp(got.lowest.data(), expected.lowest.data(), bytes) == 0);
  CHECK(std::memcmp(got.highest.data(), expected.highest.data(), bytes) == 0);
  CHECK(got.counts.nans == expected.counts.nans);
  CHECK(got.counts.positive_infs == expected.counts.positive_infs);
  CHECK(got.counts.negative_infs == expected.counts.negative_infs);
}

State one_by_one(const float* x, std::int64_t outer, std::int64_t ranges, std::int64_t inner) {
  State state(ranges);
  for (std::int64_t i = 0; i < outer * ranges * inner; ++i) {
    const std::int64_t r = i / inner % ranges;
    FiniteRange range{state.lowest[r], state.highest[r]};
    qsim::observe(x[i], range, state.counts);
    state.lowest[r] = range.lowest, state.highest[r] = range.highest;
  }
  return state;
}

std::vector<float> sample(std::int64_t n, double broken) {
  std::mt19937 generator(static_cast<unsigned>(n));
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  const float specials[] = {kNan, kInf, -kInf, -0.f, 0.f, 1e-45f, -1e-45f, 3.4028235e38f, -3.4028235e38f};
  std::vector<float> x(n);
  for (float& e : x) e = uniform(generator) < broken ? specials[generator() % 9] : normal(generator);
  return x;
}

}  // namespace

TEST_CASE("every layout, at every alignment") {
  const std::int64_t layouts[][3] = {{1, 1, 0},     {1, 1, 1},    {1, 1, 15},   {1, 1, 5000}, {7000, 1, 1},
                                     {3, 5, 200},   {1, 40, 9},   {50, 3, 1},   {100, 7, 3},  {20, 64, 1},
                                     {33, 1000, 1}, {17, 40, 49}, {64, 530, 1}, {200, 2, 2}};
  for (Level level : runnable_levels()) {
    const auto run = qsim::cpu::observe_range_kernels(level).of[static_cast<int>(Element::f32)];
    for (const auto& [outer, ranges, inner] : layouts) {
      for (double broken : {0.0, 0.001, 0.5, 1.0}) {
        for (int offset : {0, 1}) {
          const auto x = sample(outer * ranges * inner + offset, broken);
          State state(ranges);
          run(x.data() + offset, outer, ranges, inner, state.lowest.data(), state.highest.data(), state.counts);
          check_same(state, one_by_one(x.data() + offset, outer, ranges, inner));
        }
      }
    }
  }
}

TEST_CASE("every float16, bfloat16 and their like in float64") {
  for (Level level : runnable_levels()) {
    const auto& kernels = qsim::cpu::observe_range_kernels(level);
    std::vector<std::uint16_t> bits(65536);
    for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
    std::vector<float> brains(65536), halves(65536);
    std::vector<double> doubles(65536);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const std::uint32_t shifted = i << 16;
      std::memcpy(&brains[i], &shifted, 4);
      doubles[i] = brains[i];
      const int exponent = i >> 10 & 31, mantissa = i & 1023;
      const float magnitude = exponent == 31  ? (mantissa == 0 ? kInf : kNan)
                              : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                              : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
      halves[i] = i >> 15 ? -magnitude : magnitude;
    }
    const auto check = [&](Element element, const void* x, const std::vector<float>& values) {
      for (const auto& [outer, ranges, inner] :
           {std::array<std::int64_t, 3>{1, 65536, 1}, {256, 256, 1}, {1, 1, 65536}}) {
        State state(ranges);
        kernels.of[static_cast<int>(element)](x, outer, ranges, inner, state.lowest.data(), state.highest.data(),
                                              state.counts);
        check_same(state, one_by_one(values.data(), outer, ranges, inner));
      }
    };
    check(Element::bf16, bits.data(), brains);
    check(Element::f16, bits.data(), halves);
    check(Element::f64, doubles.data(), brains);
  }
}

TEST_CASE("float64 beyond float32 is infinite") {
  const double x[] = {1e39, -1e300, 3.4028235677973366e38, 3.4028234e38, 1e-300};
  for (Level level : runnable_levels()) {
    State state(1);
    qsim::cpu::observe_range_kernels(level).of[static_cast<int>(Element::f64)](x, 1, 1, 5, state.lowest.data(),
                                                                               state.highest.data(), state.counts);
    CHECK(state.counts.positive_infs == 2);  // the third is half a step above the largest float32
    CHECK(state.counts.negative_infs == 1);
    CHECK(state.highest[0] == 3.4028234e38f);
    CHECK(state.lowest[0] == 0);
  }
}
