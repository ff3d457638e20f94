#include "qsim/cuda/weight_rows.h"

#include <catch2/catch.hpp>

#include "device.h"

namespace {

enum class Grid { one, of_columns, format };

const auto& descent(const float*) { return qsim::cpu::weight_row_kernels().descend_f32; }
const auto& descent(const double*) { return qsim::cpu::weight_row_kernels().descend_f64; }
const auto& feedback(const float*) { return qsim::cpu::weight_row_kernels().feed_back_f32; }
const auto& feedback(const double*) { return qsim::cpu::weight_row_kernels().feed_back_f64; }

// `groups` times `count` rows of `columns` numbers, the grids of each, and a symmetric matrix for each group.
template <class T>
struct Problem {
  qsim::cuda::WeightRows shape;
  Grid kind;
  std::vector<T> numbers, pull, step, low, high, moments, power;

  Problem(std::int64_t groups, std::int64_t count, std::int64_t columns, Grid kind_)
      : shape{static_cast<unsigned>(groups * count), static_cast<unsigned>(count), columns}, kind(kind_) {
    const std::int64_t width = kind == Grid::one ? 1 : columns;
    numbers = std::vector<T>(shape.rows * columns);
    pull = sample<T>(shape.rows * columns, 0, 3);
    for (T& x : pull) x *= static_cast<T>(columns);
    for (std::int64_t i = 0; i < shape.rows * width; ++i) {
      step.push_back(T(0.25) + static_cast<T>(i % 5) / 16);
      low.push_back(-2);
      high.push_back(static_cast<T>(1 + i % 2));
    }
    const std::vector<T> random = sample<T>(groups * columns * columns, 0, 5);
    moments = random;
    for (std::int64_t g = 0; g < groups; ++g) {
      T* const matrix = moments.data() + g * columns * columns;
      for (std::int64_t i = 0; i < columns; ++i) {
        for (std::int64_t j = 0; j < i; ++j) matrix[i * columns + j] = matrix[j * columns + i];
        matrix[i * columns + i] = T(columns) / 2 + std::fabs(matrix[i * columns + i]);
        power.push_back(matrix[i * columns + i]);
      }
    }
  }

  qsim::RowGrid<T> grid(const T* steps, const T* lows, const T* highs, std::int64_t row, std::int64_t begin) const {
    static const qsim::FormatIn<T> format = qsim::format_in<T>(qsim::FloatFormat::float8_e4m3fn, true);
    const std::int64_t stride = kind == Grid::one ? 0 : 1, at = stride == 0 ? row : row * shape.columns + begin;
    return {steps + at, lows + at, highs + at, stride, kind == Grid::format ? &format : nullptr};
  }
};

}  // namespace

TEMPLATE_TEST_CASE("coordinate descent on the device equals the CPU's", "", float, double) {
  for (const Grid kind : {Grid::one, Grid::of_columns, Grid::format}) {
    for (const std::int64_t columns : {1, 9, 31, 32, 33, 70}) {
      CAPTURE(kind, columns);
      Problem<TestType> problem(2, 9, columns, kind);
      if (columns == 33) problem.pull[40] = NAN;
      const auto& shape = problem.shape;
      const DeviceArray<TestType> numbers(problem.numbers), pull(problem.pull), step(problem.step), low(problem.low),
          high(problem.high), moments(problem.moments), power(problem.power);
      require(qsim::cuda::descend<TestType>(
          shape,
          {columns, numbers.data(), pull.data(), problem.grid(step.data(), low.data(), high.data(), 0, 0),
           moments.data(), power.data()},
          5, nullptr));
      const std::vector<TestType> start = problem.numbers;
      for (std::int64_t i = 0; i < shape.rows; ++i) {
        const std::int64_t group = i / shape.in_group;
        descent(problem.pull.data())(
            {columns, problem.numbers.data() + i * columns, problem.pull.data() + i * columns,
             problem.grid(problem.step.data(), problem.low.data(), problem.high.data(), i, 0),
             problem.moments.data() + group * columns * columns, problem.power.data() + group * columns},
            5);
      }
      CHECK(differences(problem.numbers, start) > 0);
      CHECK(differences(numbers.host(), problem.numbers) == 0);
      CHECK(differences(pull.host(), problem.pull) == 0);
    }
  }
}

TEMPLATE_TEST_CASE("error feedback on the device equals the CPU's", "", float, double) {
  for (const Grid kind : {Grid::one, Grid::of_columns, Grid::format}) {
    for (const auto& [begin, end] : {std::pair{0, 1}, {0, 70}, {3, 40}, {38, 70}, {5, 5}}) {
      CAPTURE(kind, begin, end);
      Problem<TestType> problem(2, 9, 70, kind);
      const auto& shape = problem.shape;
      const std::int64_t n = end - begin, columns = shape.columns;
      const std::vector<TestType> target = sample<TestType>(shape.rows * columns, 0, 7);
      problem.numbers = sample<TestType>(shape.rows * columns, 0, 9);
      std::vector<TestType> left(shape.rows * n);
      const DeviceArray<TestType> numbers(problem.numbers), errors(left), step(problem.step), low(problem.low),
          high(problem.high), factor(problem.moments), wanted(target);
      require(qsim::cuda::feed_back<TestType>(
          shape,
          {n, wanted.data(), numbers.data(), errors.data(), problem.grid(step.data(), low.data(), high.data(), 0, 0),
           factor.data(), columns},
          begin, nullptr));
      for (std::int64_t i = 0; i < shape.rows; ++i) {
        const std::int64_t at = i * columns + begin;
        feedback(target.data())({n, target.data() + at, problem.numbers.data() + at, left.data() + i * n,
                                 problem.grid(problem.step.data(), problem.low.data(), problem.high.data(), i, begin),
                                 problem.moments.data() + (i / shape.in_group * columns + begin) * columns + begin,
                                 columns});
      }
      CHECK(differences(numbers.host(), problem.numbers) == 0);
      CHECK(differences(errors.host(), left) == 0);
    }
  }
}

TEST_CASE("no rows, no launch") {
  CHECK(qsim::cuda::descend<float>({0, 1, 4}, {}, 1, nullptr) == cudaSuccess);
  CHECK(qsim::cuda::feed_back<double>({0, 1, 4}, {}, 0, nullptr) == cudaSuccess);
}
