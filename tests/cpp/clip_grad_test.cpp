#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "levels.h"
#include "qsim/clip_grad.h"

using qsim::GradScaling;
using qsim::NonFinitePolicy;
using qsim::cpu::Level;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> sample(int n, bool broken) {
  std::mt19937 generator(static_cast<unsigned>(n));
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& e : x) e = normal(generator) * 1e25f;  // squares are beyond float32
  if (broken && n > 2) x[n / 2] = kNan, x[n - 1] = static_cast<float>(kInf);
  return x;
}

}  // namespace

TEST_CASE("sums skip and count what is not finite, in one order at every level") {
  for (int n : {0, 1, 15, 16, 17, 1000, 16384}) {
    for (bool broken : {false, true}) {
      for (double p : {2.0, 1.0, kInf, 0.5}) {
        const auto x = sample(n, broken);
        double expected = 0;
        std::int64_t others = 0;
        for (float e : x) {
          if (!std::isfinite(e)) {
            ++others;
          } else {
            expected = p == kInf ? std::fmax(expected, std::fabs(e)) : expected + std::pow(std::fabs(double{e}), p);
          }
        }
        const auto first = qsim::cpu::clip_grad_kernels(Level::baseline).sum[0](x.data(), n, p);
        for (Level level : runnable_levels()) {
          const auto sum = qsim::cpu::clip_grad_kernels(level).sum[0](x.data(), n, p);
          CHECK(sum.power == Approx(expected).epsilon(1e-13));
          CHECK(sum.power == first.power);
          CHECK(sum.nonfinite == others);
        }
      }
    }
  }
}

TEST_CASE("scaling rounds once and clears what is not finite when asked to") {
  for (Level level : runnable_levels()) {
    for (int n : {0, 1, 7, 16, 33, 1000}) {
      const auto x = sample(n, true);
      auto scaled = x;
      qsim::cpu::clip_grad_kernels(level).scale[0](scaled.data(), n, 1.0 / 3, true);
      for (int i = 0; i < n; ++i) CHECK(scaled[i] == (std::isfinite(x[i]) ? x[i] * static_cast<float>(1.0 / 3) : 0.f));
    }
  }
}

TEST_CASE("policies") {
  const auto action = [](double power, std::int64_t nonfinite, NonFinitePolicy policy) {
    return qsim::grad_scaling({power, nonfinite}, 2, 1.0, policy).action;
  };
  CHECK(action(0.25, 0, NonFinitePolicy::skip) == GradScaling::keep);
  CHECK(action(4, 0, NonFinitePolicy::skip) == GradScaling::scale);
  CHECK(action(4, 1, NonFinitePolicy::skip) == GradScaling::clear);
  CHECK(action(4, 1, NonFinitePolicy::raise) == GradScaling::keep);
  CHECK(action(0.25, 1, NonFinitePolicy::zero) == GradScaling::scale_finite);
  CHECK(qsim::grad_scaling({16, 0}, 2, 1.0, NonFinitePolicy::zero).coefficient == 1 / (4 + 1e-6));
  CHECK(std::isnan(qsim::grad_scaling({16, 3}, 2, 1.0, NonFinitePolicy::raise).total_norm));
  CHECK(qsim::grad_scaling({8, 0}, 3, 1.0, NonFinitePolicy::skip).total_norm == Approx(2));
}
