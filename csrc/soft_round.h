// What the CPU and CUDA kernels of rounding that is learned check and read alike.
#pragma once

#include <cmath>

#include "qsim/soft_round.h"
#include "weight_rows.h"

namespace qsim {

struct SoftRoundCall {
  const at::Tensor &variable, &mean, &square, &errors, &target, &step, &low, &high;

  void check(std::int64_t at) const {
    const RowsExpected expected{"qsim_restoration::soft_round_", variable};
    TORCH_CHECK_VALUE(variable.dim() == 3 && variable.scalar_type() == at::kFloat, expected.op, ": variable is ",
                      described(variable), "; expected float32 of shape [groups, rows, columns]");
    expected.check("variable", variable, variable.sizes());
    expected.check("mean", mean, variable.sizes());
    expected.check("square", square, variable.sizes());
    expected.check("errors", errors, variable.sizes());
    expected.check("target", target, variable.sizes());
    RowGrids{step, low, high}.check(expected);
    TORCH_CHECK_VALUE(at > 0, expected.op, ": at is ", at, "; expected the number of the step, from 1 on");
    check_memory(expected.op, {{"variable", variable}, {"mean", mean}, {"square", square}, {"errors", errors}},
                 {{"target", target}, {"step", step}, {"low", low}, {"high", high}});
  }

  std::int64_t rows() const { return variable.size(0) * variable.size(1); }

  SoftRow row(std::int64_t i) const {
    const std::int64_t columns = variable.size(2), at = i * columns, width = step.size(2), of = i * width;
    return {columns,
            variable.mutable_data_ptr<float>() + at,
            mean.mutable_data_ptr<float>() + at,
            square.mutable_data_ptr<float>() + at,
            errors.mutable_data_ptr<float>() + at,
            target.const_data_ptr<float>() + at,
            step.const_data_ptr<float>() + of,
            low.const_data_ptr<float>() + of,
            high.const_data_ptr<float>() + of,
            columns == width ? 1 : 0};
  }
};

inline SoftRounding soft_rounding(std::int64_t at, double rate, double weight, double exponent) {
  const auto corrected = [&](float decay) { return 1 - std::pow(double{decay}, static_cast<double>(at)); };
  return {static_cast<float>(weight), static_cast<float>(exponent),
          static_cast<float>(rate / corrected(SoftRounding::kMean)),
          static_cast<float>(1 / std::sqrt(corrected(SoftRounding::kSquare)))};
}

}  // namespace qsim
