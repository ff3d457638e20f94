#include "weight_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace qsim {
namespace {

using at::Tensor;
using OptionalName = std::optional<std::string_view>;

template <class T>
void descend(const Tensor& rows, const Tensor& pull, const Tensor& moments, const RowGrids& grids, std::int64_t rounds,
             void (*kernel)(const DescentRow<T>&, std::int64_t)) {
  const std::int64_t groups = rows.size(0), count = rows.size(1), columns = rows.size(2);
  const Tensor power = moments.diagonal(0, 1, 2).contiguous();
  T *numbers = rows.mutable_data_ptr<T>(), *pulls = pull.mutable_data_ptr<T>();
  const T *matrices = moments.const_data_ptr<T>(), *powers = power.const_data_ptr<T>();
  const auto format = grids.format_in<T>();
  at::parallel_for(0, groups * count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t group = i / count;
      kernel({columns, numbers + i * columns, pulls + i * columns, grids.of<T>(i, 0, columns, format),
              matrices + group * columns * columns, powers + group * columns},
             rounds);
    }
  });
}

void descend_cpu(Tensor& rows, Tensor& pull, const Tensor& moments, const Tensor& step, const Tensor& low,
                 const Tensor& high, std::int64_t rounds, OptionalName format) {
  const RowGrids grids{step, low, high, format};
  check_descent(rows, pull, moments, grids);
  if (rows.numel() == 0) return;
  const auto& kernels = cpu::weight_row_kernels();
  if (rows.scalar_type() == at::kFloat) {
    descend<float>(rows, pull, moments, grids, rounds, kernels.descend_f32);
  } else {
    descend<double>(rows, pull, moments, grids, rounds, kernels.descend_f64);
  }
}

template <class T>
void feed_back(const Tensor& rows, const Tensor& errors, const Tensor& target, const Tensor& factor,
               const RowGrids& grids, std::int64_t from, void (*kernel)(const FeedbackRow<T>&)) {
  const std::int64_t count = rows.size(1), columns = rows.size(2), n = errors.size(2);
  T *numbers = rows.mutable_data_ptr<T>(), *left = errors.mutable_data_ptr<T>();
  const T *targets = target.const_data_ptr<T>(), *factors = factor.const_data_ptr<T>();
  const auto format = grids.format_in<T>();
  at::parallel_for(0, rows.size(0) * count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * columns + from;
      kernel({n, targets + at, numbers + at, left + i * n, grids.of<T>(i, from, columns, format),
              factors + (i / count * columns + from) * columns + from, columns});
    }
  });
}

Tensor feed_back_cpu(Tensor& rows, const Tensor& target, const Tensor& factor, const Tensor& step, const Tensor& low,
                     const Tensor& high, std::int64_t begin, std::int64_t end, OptionalName format) {
  const RowGrids grids{step, low, high, format};
  check_feedback(rows, target, factor, grids, begin, end);
  const Tensor errors = at::empty({rows.size(0), rows.size(1), end - begin}, rows.options());
  if (errors.numel() == 0) return errors;
  const auto& kernels = cpu::weight_row_kernels();
  if (rows.scalar_type() == at::kFloat) {
    feed_back<float>(rows, errors, target, factor, grids, begin, kernels.feed_back_f32);
  } else {
    feed_back<double>(rows, errors, target, factor, grids, begin, kernels.feed_back_f64);
  }
  return errors;
}

}  // namespace

TORCH_LIBRARY_IMPL(qsim_restoration, CPU, m) {
  m.impl("descend_", descend_cpu);
  m.impl("feed_back_", feed_back_cpu);
}
}  // namespace qsim
