#include "qsim/cuda/soft_round.h"

#include <catch2/catch.hpp>

#include "device.h"

TEST_CASE("soft rounding on the device equals the CPU's") {
  const qsim::SoftRounding how{0.01f, 7.5f, 0.02f, 1.25f};
  for (const std::int64_t columns : {1, 33, 300}) {
    for (const bool one_grid : {true, false}) {
      CAPTURE(columns, one_grid);
      const std::int64_t rows = 7, n = rows * columns, grids = one_grid ? rows : n;
      std::vector<float> variable = sample<float>(n, 0.1, 1), mean = sample<float>(n, 0, 2),
                         square = sample<float>(n, 0, 3), errors = sample<float>(n, 0.1, 4), step(grids),
                         low(grids, -4), high(grids, 3);
      const std::vector<float> target = sample<float>(n, 0.1, 5);
      for (float& x : square) x *= x;
      for (std::int64_t i = 0; i < grids; ++i) step[i] = 0.25f + static_cast<float>(i % 5) / 16;
      const DeviceArray<float> d_variable(variable), d_mean(mean), d_square(square), d_errors(errors), d_target(target),
          d_step(step), d_low(low), d_high(high);
      const std::int64_t stride = one_grid ? 0 : 1, width = one_grid ? 1 : columns;
      require(qsim::cuda::soft_round(rows,
                                     {columns, d_variable.data(), d_mean.data(), d_square.data(), d_errors.data(),
                                      d_target.data(), d_step.data(), d_low.data(), d_high.data(), stride},
                                     how, nullptr));
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t at = r * columns, of = r * width;
        qsim::cpu::soft_round_kernels().round(
            {columns, variable.data() + at, mean.data() + at, square.data() + at, errors.data() + at,
             target.data() + at, step.data() + of, low.data() + of, high.data() + of, stride},
            how);
      }
      CHECK(differences(d_variable.host(), variable) == 0);
      CHECK(differences(d_mean.host(), mean) == 0);
      CHECK(differences(d_square.host(), square) == 0);
      CHECK(differences(d_errors.host(), errors) == 0);
    }
  }
}

TEST_CASE("no numbers, no launch") { CHECK(qsim::cuda::soft_round(0, {}, {}, nullptr) == cudaSuccess); }
