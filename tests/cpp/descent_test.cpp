#include "qsim/descent.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "levels.h"

namespace {

using qsim::cpu::DescentRow;

template <class T>
struct Problem {
  std::int64_t columns, stride;
  std::vector<T> numbers, pull, step, low, high, moments, power;

  Problem(std::int64_t n, std::int64_t stride_) : columns(n), stride(stride_) {
    std::mt19937 random(static_cast<unsigned>(2 * n + stride));
    std::normal_distribution<T> normal;
    std::vector<T> root(n * n);
    for (auto& x : root) x = normal(random);
    for (std::int64_t i = 0; i < (stride == 0 ? 1 : n); ++i) {
      step.push_back(T(0.25) + T(i % 5) / 16);
      low.push_back(-2);
      high.push_back(T(1 + i % 2));
    }
    for (std::int64_t i = 0; i < n; ++i) {
      numbers.push_back(0);
      pull.push_back(normal(random) * static_cast<T>(n));
      for (std::int64_t j = 0; j < n; ++j) {
        T sum = i == j ? T(n) / 10 : 0;
        for (std::int64_t k = 0; k < n; ++k) sum += root[i * n + k] * root[j * n + k];
        moments.push_back(sum);
      }
      power.push_back(moments[i * n + i]);
    }
  }

  DescentRow<T> row() {
    return {columns,     numbers.data(), pull.data(),    step.data(), low.data(),
            high.data(), stride,         moments.data(), power.data()};
  }
};

// Algorithm 1 as it is published: every column in its turn.
template <class T>
void one_by_one(const DescentRow<T>& row, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    for (std::int64_t i = 0; i < row.columns; ++i) {
      const std::int64_t of = i * row.stride;
      T steps = std::nearbyint((row.numbers[i] + row.pull[i] / row.power[i]) / row.step[of]);
      steps = std::fmin(std::fmax(steps, row.low[of]), row.high[of]);
      const T change = steps * row.step[of] - row.numbers[i];
      row.numbers[i] += change;
      if (change == 0) continue;
      row.numbers[i] = steps * row.step[of];
      for (std::int64_t j = 0; j < row.columns; ++j) {
        const volatile T product = change * row.moments[i * row.columns + j];  // two roundings
        row.pull[j] -= product;
      }
    }
  }
}

template <class T, class Descend>
void compare(Descend descend, std::int64_t n, std::int64_t stride) {
  Problem<T> found(n, stride), expected(n, stride);
  found.numbers.push_back(T(77));  // nothing beyond the last column
  found.pull.push_back(T(77));
  descend(found.row(), 7);
  one_by_one(expected.row(), 7);
  CHECK(found.numbers.back() == T(77));
  CHECK(found.pull.back() == T(77));
  found.numbers.pop_back();
  found.pull.pop_back();
  CHECK(found.numbers == expected.numbers);
  CHECK(found.pull == expected.pull);
  CHECK(std::any_of(found.numbers.begin(), found.numbers.end(), [](T x) { return x != 0; }));
}

}  // namespace

TEST_CASE("coordinate descent is the published one to the bit") {
  for (auto level : runnable_levels()) {
    const auto& kernels = qsim::cpu::descent_kernels(level);
    for (std::int64_t n : {3, 9, 63, 64, 65, 130}) {
      for (std::int64_t stride : {0, 1}) {
        CAPTURE(qsim::cpu::name_of(level), n, stride);
        compare<float>(kernels.f32, n, stride);
        compare<double>(kernels.f64, n, stride);
      }
    }
  }
}

TEST_CASE("coordinate descent ends where numbers are not finite, and touches nothing where nothing is better") {
  for (auto level : runnable_levels()) {
    const auto& kernels = qsim::cpu::descent_kernels(level);
    for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1e308}) {
      Problem<double> problem(70, 0);
      problem.pull[5] = bad;
      kernels.f64(problem.row(), 10);
      Problem<double> settled(70, 1);
      kernels.f64(settled.row(), 100);
      const auto numbers = settled.numbers, pull = settled.pull;
      kernels.f64(settled.row(), 100);
      CHECK(settled.numbers == numbers);
      CHECK(settled.pull == pull);
    }
    Problem<double> empty(0, 1);
    kernels.f64(empty.row(), 3);
  }
}
