#include "qsim/soft_round.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "levels.h"

namespace {

// A row and all that is kept of it, on a grid of its own for each column or one for all.
struct Row {
  std::int64_t stride;
  std::vector<float> variable, mean, square, errors, target, step, low, high;

  Row(std::int64_t n, std::int64_t stride_) : stride(stride_) {
    std::mt19937 random(static_cast<unsigned>(2 * n + stride));
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < n; ++i) {
      variable.push_back(2 * normal(random));
      mean.push_back(normal(random) / 10);
      square.push_back(std::fabs(normal(random)) / 100);
      errors.push_back(normal(random));
      target.push_back(2 * normal(random));
    }
    for (std::int64_t i = 0; i < (stride == 0 ? 1 : n); ++i) {
      step.push_back(0.25f + static_cast<float>(i % 5) / 16);
      low.push_back(-4);
      high.push_back(static_cast<float>(3 + i % 2));
    }
  }

  qsim::SoftRow row() {
    return {static_cast<std::int64_t>(variable.size()),
            variable.data(),
            mean.data(),
            square.data(),
            errors.data(),
            target.data(),
            step.data(),
            low.data(),
            high.data(),
            stride};
  }
};

double stretched(double variable) { return 1.2 / (1 + std::exp(-variable)) - 0.1; }

// The formulas as they are published, in float64, with the derivative of what is lost taken by differences.
void expect(const Row& before, const Row& after, std::size_t i, const qsim::SoftRounding& how, double rate,
            double root) {
  const std::size_t of = before.stride == 0 ? 0 : i;
  const double step = before.step[of], low = before.low[of], high = before.high[of], target = before.target[i];
  const double below = std::floor(before.target[i] / before.step[of]);
  const auto number = [&](double v) {
    return std::clamp(below + std::clamp(stretched(v), 0.0, 1.0), low, high) * step;
  };
  const auto loss = [&](double v) {
    const double up = std::clamp(stretched(v), 0.0, 1.0);
    return before.errors[i] * number(v) + how.weight * (1 - std::pow(std::fabs(2 * up - 1), double{how.exponent}));
  };
  const double v = before.variable[i], h = 1e-5;
  for (double edge : {stretched(v), 1 - stretched(v), below + stretched(v) - low, below + stretched(v) - high}) {
    if (std::fabs(edge) < 1e-3) return;  // no derivative there
  }
  const double gradient = (loss(v + h) - loss(v - h)) / (2 * h);
  const double mean = 0.9 * before.mean[i] + 0.1 * gradient;
  const double square = 0.999 * before.square[i] + 0.001 * gradient * gradient;
  const double variable = v - rate * mean / (std::sqrt(square) / root + 1e-8);
  CHECK(after.mean[i] == Approx(mean).margin(2e-6));
  CHECK(after.square[i] == Approx(square).margin(2e-6));
  CHECK(after.variable[i] == Approx(variable).margin(2e-6));
  CHECK(after.errors[i] == Approx(number(after.variable[i]) - target).margin(2e-6));
}

}  // namespace

TEST_CASE("exp and log are within three units in the last place") {
  const auto within = [](float found, double expected) {
    const float nearest = static_cast<float>(expected);
    const double unit = std::nextafter(std::fabs(nearest), std::numeric_limits<float>::infinity()) - std::fabs(nearest);
    return std::fabs(found - expected) <= 3 * unit;
  };
  bool exponentials = true, logarithms = true;
  for (float x = -87; x <= 87; x += 0x1p-8f + 0x1p-15f)
    exponentials = exponentials && within(qsim::exponential(x), std::exp(double{x}));
  for (float x = 1.2e-38f; x < 3e38f; x *= 1.0013f)
    logarithms = logarithms && within(qsim::logarithm(x), std::log(double{x}));
  CHECK(exponentials);
  CHECK(logarithms);
  CHECK(qsim::exponential(0.0f) == 1);
  CHECK(qsim::logarithm(1.0f) == 0);
  CHECK(qsim::exponential(1e30f) == qsim::exponential(87.0f));
  CHECK(qsim::exponential(-1e30f) == qsim::exponential(-87.0f));
}

TEST_CASE("a step of soft rounding is the published one") {
  for (auto level : runnable_levels()) {
    for (std::int64_t n : {0, 1, 7, 64, 301}) {
      for (std::int64_t stride : {0, 1}) {
        for (float exponent : {2.0f, 2.5f, 20.0f}) {
          CAPTURE(qsim::cpu::name_of(level), n, stride, exponent);
          const qsim::SoftRounding how{0.5f, exponent, 0.02f, 1 / 0.75f};
          Row found(n, stride);
          for (auto* all : {&found.variable, &found.mean, &found.square, &found.errors}) all->reserve(all->size() + 1);
          const Row before = found;
          qsim::cpu::soft_round_kernels(level).round(found.row(), how);
          for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) expect(before, found, i, how, 0.02, 0.75);
        }
      }
    }
  }
}

TEST_CASE("every level rounds softly to the same bits, and what is not finite stays by itself") {
  const qsim::SoftRounding how{0.01f, 11.3f, 0.02f, 1.25f};
  Row expected(301, 1);
  const float bad[] = {NAN, INFINITY, -INFINITY, 1e38f, -1e38f, 1e-45f};
  for (std::size_t i = 0; i < 6; ++i) {
    expected.errors[10 * i] = bad[i];
    expected.target[10 * i + 1] = bad[i];
    expected.variable[10 * i + 2] = bad[i];
  }
  const Row before = expected;
  for (std::int64_t i = 0; i < 301; ++i) qsim::soft_round(expected.row(), i, i, how);
  std::size_t finite = 0;
  for (float x : expected.errors) finite += std::isfinite(x);
  CHECK(finite >= 301 - 18);
  for (auto level : runnable_levels()) {
    CAPTURE(qsim::cpu::name_of(level));
    Row found = before;
    qsim::cpu::soft_round_kernels(level).round(found.row(), how);
    for (auto member : {&Row::variable, &Row::mean, &Row::square, &Row::errors}) {
      for (std::size_t i = 0; i < 301; ++i) {
        const float a = (found.*member)[i], b = (expected.*member)[i];
        CHECK((std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b)));
      }
    }
  }
}
