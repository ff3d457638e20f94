// What the CPU and CUDA kernels for rows of weights on grids check and read alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "described.h"
#include "memory.h"
#include "qsim/weight_rows.h"
#include "round_to_format.h"

namespace qsim {

// What an operator checks of tensors that have to fit to `rows`, [groups, rows, columns].
struct RowsExpected {
  const char* op;
  const at::Tensor& rows;

  void check_rows() const {
    TORCH_CHECK_VALUE(rows.dim() == 3 && (rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kDouble), op,
                      ": rows is ", described(rows), "; expected float32 or float64 of shape [groups, rows, columns]");
    check("rows", rows, rows.sizes());
  }
  void check(const char* name, const at::Tensor& x, at::IntArrayRef shape) const {
    TORCH_CHECK_VALUE(
        x.sizes() == shape && x.is_contiguous() && x.scalar_type() == rows.scalar_type() && x.device() == rows.device(),
        op, ": ", name, " is ", described(x), "; expected a contiguous ", described(rows.scalar_type()), " of shape ",
        shape, " on ", rows.device());
  }
  void check_square(const char* name, const at::Tensor& x) const {
    check(name, x, {rows.size(0), rows.size(2), rows.size(2)});
  }
};

// The grids of all rows: multiples of `step` from `low` to `high`, or the numbers of `format` times `step`.
struct RowGrids {
  const at::Tensor &step, &low, &high;
  std::optional<std::string_view> format = {};

  void check(const RowsExpected& expected) const {
    const at::Tensor& rows = expected.rows;
    const std::int64_t width = step.dim() == 3 && step.size(2) == 1 ? 1 : rows.size(2);
    const std::int64_t shape[] = {rows.size(0), rows.size(1), width};
    expected.check("step", step, shape);
    expected.check("low", low, shape);
    expected.check("high", high, shape);
    TORCH_CHECK_VALUE(!format || shape_of(float_format_named(expected.op, *format)).scaled, expected.op,
                      ": got format '", *format, "'; expected one that is scaled");
  }

  template <class T>
  std::optional<FormatIn<T>> format_in() const {
    if (!format) return {};
    return qsim::format_in<T>(float_format_named("", *format), true);
  }

  // From the column `begin` of row `row` on, of all rows; `columns` that these have.
  template <class T>
  RowGrid<T> of(std::int64_t row, std::int64_t begin, std::int64_t columns,
                const std::optional<FormatIn<T>>& described) const {
    const std::int64_t width = step.size(2), stride = columns == width ? 1 : 0, at = row * width + begin * stride;
    return {step.const_data_ptr<T>() + at, low.const_data_ptr<T>() + at, high.const_data_ptr<T>() + at, stride,
            described ? &*described : nullptr};
  }
};

inline void check_descent(const at::Tensor& rows, const at::Tensor& pull, const at::Tensor& moments,
                          const RowGrids& grids) {
  const RowsExpected expected{"qsim_restoration::descend_", rows};
  expected.check_rows();
  expected.check("pull", pull, rows.sizes());
  expected.check_square("moments", moments);
  grids.check(expected);
  check_memory(expected.op, {{"rows", rows}, {"pull", pull}},
               {{"moments", moments}, {"step", grids.step}, {"low", grids.low}, {"high", grids.high}});
}

inline void check_feedback(const at::Tensor& rows, const at::Tensor& target, const at::Tensor& factor,
                           const RowGrids& grids, std::int64_t begin, std::int64_t end) {
  const RowsExpected expected{"qsim_restoration::feed_back_", rows};
  expected.check_rows();
  expected.check("target", target, rows.sizes());
  expected.check_square("factor", factor);
  grids.check(expected);
  TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= rows.size(2), expected.op, ": begin is ", begin, ", end ", end,
                    "; expected 0 <= begin <= end <= ", rows.size(2), ", the columns that there are");
  check_memory(
      expected.op, {{"rows", rows}},
      {{"target", target}, {"factor", factor}, {"step", grids.step}, {"low", grids.low}, {"high", grids.high}});
}

}  // namespace qsim
