#include "qsim/weight_rows.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "levels.h"

namespace {

using qsim::DescentRow;
using qsim::FeedbackRow;
using qsim::RowGrid;

enum class Grid { one, of_columns, format };

template <class T>
struct Problem {
  std::int64_t columns;
  Grid kind;
  std::vector<T> numbers, pull, step, low, high, moments, power;

  Problem(std::int64_t n, Grid kind_) : columns(n), kind(kind_) {
    std::mt19937 random(static_cast<unsigned>(3 * n) + static_cast<unsigned>(kind));
    std::normal_distribution<T> normal;
    std::vector<T> root(n * n);
    for (auto& x : root) x = normal(random);
    for (std::int64_t i = 0; i < (kind == Grid::one ? 1 : n); ++i) {
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

  RowGrid<T> grid() const {
    static const qsim::FormatIn<T> format = qsim::format_in<T>(qsim::FloatFormat::float4_e2m1fn, true);
    return {step.data(), low.data(), high.data(), kind == Grid::one ? 0 : 1, kind == Grid::format ? &format : nullptr};
  }
  DescentRow<T> row() { return {columns, numbers.data(), pull.data(), grid(), moments.data(), power.data()}; }
};

// The number of float4_e2m1fn next to x, the one with an even mantissa where two are: OCP Microscaling Formats (MX)
// Specification v1.0, section 5.3.3.
template <class T>
T next_of_format(T x) {
  const T magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  int best = 0;
  for (int i = 1; i < 8; ++i) {
    const T apart = std::fabs(std::fabs(x) - magnitudes[i]), least = std::fabs(std::fabs(x) - magnitudes[best]);
    if (apart < least || (apart == least && i % 2 == 0)) best = i;
  }
  return std::copysign(magnitudes[best], x);
}

template <class T>
T next_to(T wanted, const RowGrid<T>& grid, std::int64_t i) {
  const std::int64_t of = i * grid.stride;
  if (grid.format != nullptr) return next_of_format(wanted / grid.step[of]) * grid.step[of];
  const T steps = std::nearbyint(wanted / grid.step[of]);
  return std::fmin(std::fmax(steps, grid.low[of]), grid.high[of]) * grid.step[of];
}

// Algorithm 1 as it is published: every column in its turn.
template <class T>
void one_by_one(const DescentRow<T>& row, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    for (std::int64_t i = 0; i < row.columns; ++i) {
      const T number = next_to(row.numbers[i] + row.pull[i] / row.power[i], row.grid, i);
      const T change = number - row.numbers[i];
      row.numbers[i] += change;
      if (change == 0) continue;
      row.numbers[i] = number;
      for (std::int64_t j = 0; j < row.columns; ++j) {
        const volatile T product = change * row.moments[i * row.columns + j];  // two roundings
        row.pull[j] -= product;
      }
    }
  }
}

template <class T, class Descend>
void compare(Descend descend, std::int64_t n, Grid kind) {
  Problem<T> found(n, kind), expected(n, kind);
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

// Each column gathers what those behind it hand on, in their order, where the kernel hands it on.
template <class T, class FeedBack>
void compare_feedback(FeedBack feed_back, std::int64_t n, Grid kind) {
  const Problem<T> problem(n, kind);
  const std::int64_t wide = n + 3;  // the matrix has other columns beside these
  std::vector<T> target(n), handed(n), factor(wide * wide, T(99)), numbers(n), errors(n);
  std::mt19937 random(static_cast<unsigned>(n));
  std::normal_distribution<T> normal;
  for (std::int64_t i = 0; i < n; ++i) {
    target[i] = normal(random);
    handed[i] = normal(random);
    for (std::int64_t j = 0; j <= i; ++j) factor[i * wide + j] = i == j ? T(2) + T(i % 3) : normal(random) / 4;
  }
  for (std::int64_t i = n - 1; i >= 0; --i) {
    T sum = handed[i];
    for (std::int64_t k = n - 1; k > i; --k) {
      const volatile T product = errors[k] * factor[k * wide + i];  // two roundings
      sum += product;
    }
    numbers[i] = next_to(target[i] + sum / factor[i * wide + i], problem.grid(), i);
    errors[i] = target[i] - numbers[i];
  }
  std::vector<T> found = handed, left(n + 1, T(77));
  found.push_back(T(77));
  feed_back(FeedbackRow<T>{n, target.data(), found.data(), left.data(), problem.grid(), factor.data(), wide});
  CHECK(found.back() == T(77));
  CHECK(left.back() == T(77));
  found.pop_back();
  left.pop_back();
  CHECK(found == numbers);
  CHECK(left == errors);
}

}  // namespace

TEST_CASE("error feedback is the published one to the bit") {
  for (auto level : runnable_levels()) {
    const auto& kernels = qsim::cpu::weight_row_kernels(level);
    for (std::int64_t n : {0, 1, 3, 9, 63, 64, 65, 128}) {
      for (Grid kind : {Grid::one, Grid::of_columns, Grid::format}) {
        CAPTURE(qsim::cpu::name_of(level), n, kind);
        compare_feedback<float>(kernels.feed_back_f32, n, kind);
        compare_feedback<double>(kernels.feed_back_f64, n, kind);
      }
    }
  }
}

TEST_CASE("coordinate descent is the published one to the bit") {
  for (auto level : runnable_levels()) {
    const auto& kernels = qsim::cpu::weight_row_kernels(level);
    for (std::int64_t n : {3, 9, 63, 64, 65, 130}) {
      for (Grid kind : {Grid::one, Grid::of_columns, Grid::format}) {
        CAPTURE(qsim::cpu::name_of(level), n, kind);
        compare<float>(kernels.descend_f32, n, kind);
        compare<double>(kernels.descend_f64, n, kind);
      }
    }
  }
}

TEST_CASE("coordinate descent ends where numbers are not finite, and touches nothing where nothing is better") {
  for (auto level : runnable_levels()) {
    const auto& kernels = qsim::cpu::weight_row_kernels(level);
    for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1e308}) {
      Problem<double> problem(70, Grid::one);
      problem.pull[5] = bad;
      kernels.descend_f64(problem.row(), 10);
      Problem<double> settled(70, Grid::of_columns);
      kernels.descend_f64(settled.row(), 100);
      const auto numbers = settled.numbers, pull = settled.pull;
      kernels.descend_f64(settled.row(), 100);
      CHECK(settled.numbers == numbers);
      CHECK(settled.pull == pull);
    }
    Problem<double> empty(0, Grid::of_columns);
    kernels.descend_f64(empty.row(), 3);
  }
}
